#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/train.h"
#include "loops.h"
#include "platform.h"
#include "context.h"
#include "arena.h"


// >>threads

/* The threads of a context. A loop of n iterations is divided into chunks, and each
   thread is assigned a range of chunks. A thread takes chunks from the front of its
   range until that is empty, and then from the back of the other threads' ranges. Each
   chunk is one call of the loop's stx_part, with the chunk as its stx_share. This way,
   no loop waits for a thread that was preempted before it entered the loop. The caller
   runs the chunks that no other thread takes, closes the loop, and waits only for
   threads that are still inside.

   stx_parallel_units instead makes one chunk per iteration (several iterations per
   chunk if there are more than 65535). All chunks are in one range, and every thread
   takes the next chunk from the front of this range.

       word      epoch, 15 bits | open, 1 bit | threads inside, 16 bits

       caller    writes the job and the ranges; sets word = next epoch, open; works;
                 clears open; waits until no thread is inside
       others    see a new open epoch; if it is still open, add 1 to the threads inside;
                 work; subtract 1

   Idle threads spin for STX__SPIN us before they sleep, because the next loop usually
   starts immediately.

   When other programs compete for the processors, spinning uses time that the scheduler
   would otherwise give to real work. There are two signs of this: an idle thread was
   preempted while it spun, or the caller waited long for a preempted thread. For some
   time after these signs, idle threads sleep without spinning. Linux reports whether a
   thread was preempted in favour of another; on other systems, every long delay is
   counted as a preemption. On Linux, time that a hypervisor takes from a virtual
   machine is therefore not counted, and sleeping would not recover that time anyway.

   stx_create creates the pool, the first divided loop starts the threads, and
   stx_destroy joins them. Loops do not nest: a loop opened inside a chunk would
   overwrite the job of the threads inside.

   After a fork, the child process has no workers, and the calling thread computes alone.
   pool.running still counts the workers of the parent, so the child starts none. Between
   loops no thread is inside, so the child never waits for one. It must not lock the
   mutex, because a thread of the parent may have held it. pool.process identifies the
   parent.

   The epoch wraps around after 2^15 loops. A thread can then mistake a new loop for the
   last one that it saw and skip it. This is harmless, because the other threads do its
   work. The compare-and-swap by which a thread enters can also succeed with a word of
   2^15 loops ago. This is harmless too, because the thread reads the job only after it
   has entered. */
#if defined(STX__PTHREADS) || defined(STX__WIN_THREADS)

/* Durations in microseconds. */
enum {
    STX__SPIN        = 200,     /* how long an idle thread spins before it sleeps */
    STX__SPIN_CALLER = 1000,    /* how long the caller spins before it sleeps */
    STX__SPIN_BUSY   = 5,       /* how long the caller spins while the machine is busy */
    STX__DELAY       = 500,     /* a longer delay suggests a preemption */
    STX__POLL        = 100      /* interval between queries of the preemption count */
};

/* pool.busy increases by 500 for each sign that the machine is busy and decreases by 1
   for each loop. Idle threads do not spin while pool.busy is STX__BUSY or more.
   Therefore, after two or three signs within a few hundred loops, they sleep without
   spinning for up to 3000 loops. */
enum { STX__BUSY_SIGN = 500, STX__BUSY = 1000, STX__BUSY_MOST = 4000 };

/* Loops with less work than this (see stx_parallel) do not wake sleeping threads. */
enum { STX__WORTH_WAKING = 1 << 18 };

/* Fields of pool.word: the open bit, the mask of the number of threads inside, and the
   increment of the epoch. */
enum { STX__OPEN = 0x10000, STX__INSIDE = 0xffff, STX__EPOCH_ONE = 0x20000 };

  #ifdef STX__PTHREADS
typedef pthread_t stx__handle;
typedef pthread_mutex_t stx__mutex;
typedef pthread_cond_t stx__cond;
    #define STX__LOAD(p)     __atomic_load_n(p, __ATOMIC_SEQ_CST)
    #define STX__STORE(p, v) __atomic_store_n(p, v, __ATOMIC_SEQ_CST)
    #define STX__ADD(p, v)   __atomic_add_fetch(p, v, __ATOMIC_SEQ_CST)

/* Compare and swap: if *p equals *expected, sets *p = v and returns 1. Otherwise, sets
   *expected = *p and returns 0. */
static int stx__swap(uint32_t *p, uint32_t *expected, uint32_t v) {
    return __atomic_compare_exchange_n(p, expected, v, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

static void stx__lock(stx__mutex *m) {
    pthread_mutex_lock(m);
}

static void stx__unlock(stx__mutex *m) {
    pthread_mutex_unlock(m);
}

static void stx__sleep(stx__cond *c, stx__mutex *m) {
    pthread_cond_wait(c, m);
}

static void stx__wake(stx__cond *c) {
    pthread_cond_signal(c);
}

/* Returns the time in microseconds. -std=c99 hides CLOCK_MONOTONIC on some systems, and
   _POSIX_C_SOURCE hides gettimeofday. The time of gettimeofday can be set back, so a
   thread that spins also stops if the measured duration is negative. */
static int64_t stx__now(void) {
    #ifdef CLOCK_MONOTONIC
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
    #else
    struct timeval t;
    gettimeofday(&t, NULL);
    return (int64_t)t.tv_sec * 1000000 + t.tv_usec;
    #endif
}
  #else
typedef HANDLE stx__handle;
typedef SRWLOCK stx__mutex;
typedef CONDITION_VARIABLE stx__cond;
    #define STX__LOAD(p)     ((uint32_t)InterlockedCompareExchange((volatile LONG *)(p), 0, 0))
    #define STX__STORE(p, v) ((void)InterlockedExchange((volatile LONG *)(p), (LONG)(v)))
    #define STX__ADD(p, v) \
      ((uint32_t)InterlockedExchangeAdd((volatile LONG *)(p), (LONG)(v)) + (uint32_t)(v))

static int stx__swap(uint32_t *p, uint32_t *expected, uint32_t v) {
    const uint32_t was = (uint32_t)InterlockedCompareExchange((volatile LONG *)p, (LONG)v,
                                                              (LONG)*expected);
    if (was == *expected) return 1;
    *expected = was;
    return 0;
}

static void stx__lock(stx__mutex *m) {
    AcquireSRWLockExclusive(m);
}

static void stx__unlock(stx__mutex *m) {
    ReleaseSRWLockExclusive(m);
}

static void stx__sleep(stx__cond *c, stx__mutex *m) {
    SleepConditionVariableSRW(c, m, INFINITE, 0);
}

static void stx__wake(stx__cond *c) {
    WakeConditionVariable(c);
}

static int64_t stx__now(void) {
    LARGE_INTEGER t, f;
    QueryPerformanceCounter(&t);
    QueryPerformanceFrequency(&f);
    return (int64_t)((double)t.QuadPart * 1e6 / (double)f.QuadPart);
}
  #endif

static void stx__pause(void) {
  #if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
    _mm_pause();
  #elif defined(__aarch64__) && (defined(__GNUC__) || defined(__clang__))
    __asm__ volatile("yield");
  #elif defined(STX__WIN_THREADS)
    YieldProcessor();
  #endif
}

/* The chunks that remain in a thread's range, as first << 16 | end. Padded to the size
   of a cache line. */
typedef struct stx__chunk_range {
    uint32_t left;
    char pad[60];
} stx__chunk_range;

typedef struct stx__worker {
    stx_ctx *x;
    struct stx__pool *pool;
    size_t index;       /* stx_share.thread: i + 1 for pool.worker[i] */
    stx__handle handle;
} stx__worker;

/* Returns whether another thread has preempted this one since the last call. *count
   holds the number of times that this thread had been preempted at that call, and is
   updated. Always returns 1 if the system does not report preemptions. */
static int stx__preempted(uint32_t *count) {
  #if defined(STX__PTHREADS) && defined(__linux__)
    struct rusage use;
    const uint32_t was = *count;
    memset(&use, 0, sizeof use);
    (void)getrusage(1, &use); /* RUSAGE_THREAD, which -std=c99 hides */
    *count = (uint32_t)use.ru_nivcsw;
    return *count != was;
  #else
    (void)count;
    return 1;
  #endif
}

typedef struct stx__pool {
    /* The job. The caller writes these fields while no thread is inside, and then stores
       `word`, which publishes them. */
    stx_part part;
    const void *job;
    size_t n, chunk;          /* iterations in the loop; iterations per chunk */
    int one_range;            /* 1: all threads take chunks from the front of ranges[0] */

    /* Read and written by all threads, atomically. `word` is described above. `asleep`
       counts the workers that wait for `work` and changes under the mutex.
       caller_asleep is 1 while the caller waits for `done`. `quit` ends the workers. */
    uint32_t word, asleep, caller_asleep, quit;
    uint32_t busy;            /* how busy the machine is: see STX__BUSY */
    uint32_t preemptions;     /* how often a preempted worker spent more than STX__DELAY
                                 inside a loop */
    stx__chunk_range *ranges; /* (threads): chunks of each thread, the caller first; can
                                 be empty */

    /* written only by the caller, except for the mutex and the conditions */
    stx__mutex mutex;
    stx__cond work, done;
    size_t threads;           /* maximum threads per loop, including the caller */
    size_t running;           /* threads started, excluding the caller */
    long process;             /* the process that started the threads */
    stx__worker *worker;      /* (threads): arguments of each worker; the last element
                                 is unused */
} stx__pool;

/* Records a sign that the machine is busy. A concurrent update may be lost, which is
   harmless. */
static void stx__seen_busy(stx__pool *q) {
    uint32_t busy = STX__LOAD(&q->busy) + STX__BUSY_SIGN;
    STX__STORE(&q->busy, STX_MIN(busy, (uint32_t)STX__BUSY_MOST));
}

/* Takes a chunk from the front or, if `front` is 0, from the back of a range. *chunk
   receives the chunk's index. Returns 0 if the range is empty. The swap cannot succeed
   with an outdated value: ranges only shrink during a loop, and no loop is opened while
   a thread is inside. */
static int stx__take(stx__chunk_range *r, int front, size_t *chunk) {
    uint32_t have = STX__LOAD(&r->left), rest;
    do {
        const uint32_t first = have >> 16, end = have & 0xffff;
        if (first >= end) return 0;
        *chunk = front ? first : end - 1;
        rest = front ? (first + 1) << 16 | end : first << 16 | (end - 1);
    } while (!stx__swap(&r->left, &have, rest));
    return 1;
}

static void stx__run_chunks(stx_ctx *x, stx__pool *q, size_t thread) {
    stx_share s;
    size_t k, c;
    s.x = x;
    s.thread = thread;
    for (k = 0; k < q->threads; k++) {
        stx__chunk_range *range = q->ranges + (thread + k) % q->threads;
        while (stx__take(range, !k || q->one_range, &c)) {
            s.begin = c * q->chunk;
            s.end = STX_MIN(q->n, s.begin + q->chunk);
            q->part(&s, q->job);
        }
    }
}

/* Returns whether there is an open loop with an epoch other than `seen`. `word` is the
   value of pool.word. */
static int stx__new_loop(uint32_t word, uint32_t seen) {
    return (word & STX__OPEN) && word / STX__EPOCH_ONE != seen;
}

/* Runs chunks of the loop that the thread has entered, then leaves the loop. The last
   thread to leave a closed loop wakes the caller. *preemptions is the thread's count for
   stx__preempted. */
static void stx__work_in_loop(stx__worker *w, uint32_t *preemptions) {
    stx__pool *q = w->pool;
    const int64_t begun = stx__now();
    stx__run_chunks(w->x, q, w->index);
    if (stx__now() - begun > STX__DELAY && stx__preempted(preemptions))
        (void)STX__ADD(&q->preemptions, 1);
    if (STX__ADD(&q->word, (uint32_t)-1) & (STX__OPEN | STX__INSIDE)) return;
    if (STX__LOAD(&q->caller_asleep)) {
        /* The lock protects no data. The caller set caller_asleep under the mutex, so
           once this thread has held the mutex, the caller is either waiting or has seen
           that no thread is inside. */
        stx__lock(&q->mutex);
        stx__unlock(&q->mutex);
        stx__wake(&q->done);
    }
}

static void stx__sleep_until_loop(stx__pool *q, uint32_t seen) {
    stx__lock(&q->mutex);
    (void)STX__ADD(&q->asleep, 1);
    while (!STX__LOAD(&q->quit) && !stx__new_loop(STX__LOAD(&q->word), seen))
        stx__sleep(&q->work, &q->mutex);
    (void)STX__ADD(&q->asleep, (uint32_t)-1);
    stx__unlock(&q->mutex);
}

/* Enters each loop that opens, until `quit`. Between loops, the thread spins and reads
   the clock at every 16th pause. It sleeps if no loop opens for STX__SPIN us, or at the
   first reading if the machine is busy. idle_since is the end of the last loop or sleep,
   and `last` is the previous reading of the clock.

   After a loop, the preemption count is updated, so that preemptions in this loop are
   not attributed to a later delay. As this is a system call, `polled` limits it to one
   per STX__POLL us. */
static void stx__work(stx__worker *w) {
    stx__pool *q = w->pool;
    uint32_t word, seen = 0, preemptions = 0;
    int64_t idle_since = stx__now(), last = idle_since, polled = idle_since, now;
    int spins = 0;
    (void)stx__preempted(&preemptions);
    (void)stx__fp_enter(1);
    for (;;) {
        word = STX__LOAD(&q->word);
        if (STX__LOAD(&q->quit)) return;
        if (stx__new_loop(word, seen)) {
            if (!stx__swap(&q->word, &word, word + 1)) continue;
            seen = word / STX__EPOCH_ONE;
            stx__work_in_loop(w, &preemptions);
            idle_since = last = stx__now();
            if (idle_since - polled > STX__POLL) {
                (void)stx__preempted(&preemptions);
                polled = idle_since;
            }
            spins = 0;
            continue;
        }

        stx__pause();
        if (++spins & 15) continue;
        now = stx__now();
        if (now - last > STX__DELAY && stx__preempted(&preemptions)) stx__seen_busy(q);
        last = now;
        if (now - idle_since < STX__SPIN && now >= idle_since && STX__LOAD(&q->busy) < STX__BUSY)
            continue;
        stx__sleep_until_loop(q, seen);
        idle_since = last = stx__now();
    }
}

  #ifdef STX__PTHREADS
    #if defined(SIG_SETMASK)
      #define STX__SETMASK SIG_SETMASK
    #elif defined(__mips__) /* SIG_SETMASK on Linux, which -std=c99 hides */
      #define STX__SETMASK 3
    #else
      #define STX__SETMASK 2
    #endif

static void *stx__thread_main(void *w) {
    stx__work((stx__worker *)w);
    return NULL;
}

/* Starts a thread that blocks all signals except those raised by its own faults. For
   these, the program or a sanitizer may have a handler. */
static int stx__start(stx__worker *w) {
    pthread_attr_t attr;
    sigset_t all, old;
    int ok;
    if (pthread_attr_init(&attr)) return 0;
    (void)pthread_attr_setstacksize(&attr, (size_t)1 << 20); /* some systems default to 128 KB */
    sigfillset(&all);
    sigdelset(&all, SIGSEGV);
    sigdelset(&all, SIGFPE);
    sigdelset(&all, SIGILL);
    sigdelset(&all, SIGABRT);
    #ifdef SIGBUS
    sigdelset(&all, SIGBUS);
    #endif
    #ifdef SIGTRAP
    sigdelset(&all, SIGTRAP);
    #endif
    pthread_sigmask(STX__SETMASK, &all, &old);
    ok = !pthread_create(&w->handle, &attr, stx__thread_main, w);
    pthread_sigmask(STX__SETMASK, &old, NULL);
    pthread_attr_destroy(&attr);
    return ok;
}

static long stx__process(void) {
    return (long)getpid();
}

static void stx__thread_join(stx__handle h) {
    pthread_join(h, NULL);
}

static void stx__pool_open(stx__pool *q) {
    pthread_mutex_init(&q->mutex, NULL);
    pthread_cond_init(&q->work, NULL);
    pthread_cond_init(&q->done, NULL);
}

static void stx__pool_clear(stx__pool *q) {
    pthread_mutex_destroy(&q->mutex);
    pthread_cond_destroy(&q->work);
    pthread_cond_destroy(&q->done);
}

/* Returns the number of processors that this process may use. Unless `which` is NULL,
   *which receives a hash of the set of these processors. Processes with equal sets get
   equal hashes. On systems other than Linux, the hash is 0. */
static int stx__processors(uint64_t *which) {
    long n = 0;
    uint64_t key = 0;
    #if defined(__linux__) && (defined(CPU_COUNT) || !defined(__cplusplus))
    unsigned char set[128]; /* 1024 processors */
    size_t i;
    int k;
      #ifdef CPU_COUNT
    cpu_set_t *mask = (cpu_set_t *)(void *)set;
      #else
    /* declared here because -std=c99 hides this function */
    extern int sched_getaffinity(pid_t pid, size_t size, void *set);
    void *mask = set;
      #endif
    memset(set, 0, sizeof set);
    if (!sched_getaffinity(0, sizeof set, mask))
        for (i = 0; i < sizeof set; i++) {
            for (k = 0; k < 8; k++) n += set[i] >> k & 1;
            key = stx_key_add(key, set[i]);
        }
    #endif
    if (which) *which = key;
    #ifdef _SC_NPROCESSORS_ONLN
    if (n < 1) n = sysconf(_SC_NPROCESSORS_ONLN);
    #elif defined(__FreeBSD__)
    if (n < 1) n = sysconf(58); /* _SC_NPROCESSORS_ONLN, which _POSIX_C_SOURCE hides */
    #endif
    return (int)STX_MAX(1, STX_MIN(n, 4096));
}
  #else
static DWORD WINAPI stx__thread_main(void *w) {
    stx__work((stx__worker *)w);
    return 0;
}

static int stx__start(stx__worker *w) {
    return (w->handle = CreateThread(NULL, 0, stx__thread_main, w, 0, NULL)) != NULL;
}

static long stx__process(void) {
    return (long)GetCurrentProcessId();
}

static void stx__thread_join(stx__handle h) {
    WaitForSingleObject(h, INFINITE);
    CloseHandle(h);
}

static void stx__pool_open(stx__pool *q) {
    InitializeSRWLock(&q->mutex);
    InitializeConditionVariable(&q->work);
    InitializeConditionVariable(&q->done);
}

static void stx__pool_clear(stx__pool *q) {
    (void)q;
}

static int stx__processors(uint64_t *which) {
    DWORD_PTR mine, all;
    int n = 0;
    if (which) *which = 0;
    if (GetProcessAffinityMask(GetCurrentProcess(), &mine, &all))
        for (; mine; mine &= mine - 1) n++;
    return n < 1 ? 1 : n;
}
  #endif

/* Starts the threads for the first loop. If the system cannot start some of them, the
   others take over their work. */
static void stx__start_all(stx_ctx *x, stx__pool *q) {
    q->process = stx__process();
    while (q->running + 1 < q->threads) {
        stx__worker *w = q->worker + q->running;
        w->x = x;
        w->pool = q;
        w->index = q->running + 1;
        if (!stx__start(w)) break;
        q->running++;
    }
    if (!q->running) q->threads = 1;
}

/* Creates the pool, unless there is one. Its memory remains allocated until the context
   is freed, even if stx_group_join replaces the pool by a smaller one. */
static void stx__pool_make(stx_ctx *x) {
    size_t threads = (size_t)x->desc.threads;
    stx__pool *q;
    if (threads < 2 || x->threads.pool) return;
    q = (stx__pool *)stx_persist(x, sizeof *q);
    if (q) q->ranges = (stx__chunk_range *)stx_persist(x, threads * sizeof *q->ranges);
    if (q) q->worker = (stx__worker *)stx_persist(x, threads * sizeof *q->worker);
    if (!q || !q->ranges || !q->worker) return;
    q->threads = threads;
    stx__pool_open(q);
    x->threads.pool = q;
}

static void stx__pool_free(stx_ctx *x) {
    stx__pool *q = x->threads.pool;
    size_t i;
    if (!q) return;
    x->threads.pool = NULL;
    /* after a fork, the threads belong to the parent process */
    if (q->running && q->process != stx__process()) return;
    stx__lock(&q->mutex);
    STX__STORE(&q->quit, 1);
    stx__unlock(&q->mutex);
    for (i = 0; i < q->running; i++) stx__wake(&q->work);
    for (i = 0; i < q->running; i++) stx__thread_join(q->worker[i].handle);
    stx__pool_clear(q);
}

/* Publishes the job and its chunk ranges, opens the loop, and wakes sleeping
   threads. */
static void stx__open_loop(stx__pool *q, size_t n, size_t chunks, size_t work, int one_range,
                           stx_part part, const void *job) {
    const uint32_t word = STX__LOAD(&q->word);
    uint32_t asleep;
    size_t i;
    q->part = part;
    q->job = job;
    q->n = n;
    q->one_range = one_range;
    q->chunk = (n + chunks - 1) / chunks; /* rounded up, so fewer chunks can suffice */
    chunks = (n + q->chunk - 1) / q->chunk;
    for (i = 0; i < q->threads; i++) {
        size_t first = chunks * i / q->threads, end = chunks * (i + 1) / q->threads;
        if (one_range) { /* range 0 contains all chunks */
            first = 0;
            end = i ? 0 : chunks;
        }
        STX__STORE(&q->ranges[i].left, (uint32_t)(first << 16 | end));
    }
    STX__STORE(&q->word, (word / STX__EPOCH_ONE + 1) * STX__EPOCH_ONE | STX__OPEN);

    asleep = STX__LOAD(&q->asleep);
    if (!asleep || work < STX__WORTH_WAKING || q->process != stx__process()) return;
    /* as in stx__work_in_loop: once this thread has held the mutex, each thread counted
       in `asleep` is either waiting or has seen the loop */
    stx__lock(&q->mutex);
    stx__unlock(&q->mutex);
    for (i = 0; i < asleep && i + 1 < chunks; i++) stx__wake(&q->work);
}

/* Waits until no thread is inside the closed loop, and returns how long that took.
   Spins for the first `spin` microseconds, then sleeps. */
static int64_t stx__wait_for_threads(stx__pool *q, int64_t begun, int64_t spin) {
    int64_t waited = 0;
    int spins = 0;
    while (STX__LOAD(&q->word) & STX__INSIDE) {
        stx__pause();
        if (++spins & 15) continue;
        waited = stx__now() - begun;
        if (waited >= 0 && waited < spin) continue;
        stx__lock(&q->mutex);
        STX__STORE(&q->caller_asleep, 1);
        while (STX__LOAD(&q->word) & STX__INSIDE) stx__sleep(&q->done, &q->mutex);
        STX__STORE(&q->caller_asleep, 0);
        stx__unlock(&q->mutex);
        waited = stx__now() - begun;
    }
    return waited;
}

/* Runs a loop of at least 2 chunks on all threads. */
static void stx__run_pool(stx_ctx *x, stx__pool *q, size_t n, size_t chunks, size_t work,
                          int one_range, stx_part part, const void *job) {
    const uint32_t busy = STX__LOAD(&q->busy), preemptions = STX__LOAD(&q->preemptions);
    const int64_t begun = stx__now();
    int64_t done, waited;
    if (!q->running) stx__start_all(x, q);
    if (busy) STX__STORE(&q->busy, busy - 1);

    stx__open_loop(q, n, chunks, work, one_range, part, job);
    stx__run_chunks(x, q, 0);
    if (!(STX__ADD(&q->word, (uint32_t)-STX__OPEN) & STX__INSIDE)) return;
    done = stx__now();
    waited = stx__wait_for_threads(q, done, busy < STX__BUSY ? STX__SPIN_CALLER : STX__SPIN_BUSY);

    /* A long final chunk alone is not a sign of a busy machine, so the wait must exceed
       twice the time that the caller's own chunks took. */
    if (waited > STX__DELAY && waited > 2 * (done - begun)
        && STX__LOAD(&q->preemptions) != preemptions)
        stx__seen_busy(q);
}
#else
static void stx__pool_make(stx_ctx *x) {
    (void)x;
}

static void stx__pool_free(stx_ctx *x) {
    (void)x;
}
#endif

/* Runs a loop in at most the given number of chunks. If n or `chunks` is 0 or 1, or the
   context has no pool, the calling thread runs the whole loop in one call. */
static void stx__parallel(stx_ctx *x, size_t n, size_t chunks, size_t work, int one_range,
                          stx_part part, const void *job) {
    stx__fp was = stx__fp_enter(1);
    int parallel = 0;
#if defined(STX__PTHREADS) || defined(STX__WIN_THREADS)
    chunks = STX_MIN(n, STX_MIN(chunks, (size_t)0xffff));
    if (chunks > 1 && x && x->threads.pool) {
        stx__run_pool(x, x->threads.pool, n, chunks, work, one_range, part, job);
        parallel = 1;
    }
#endif
    (void)chunks;
    (void)work;
    (void)one_range;
    if (n && !parallel) {
        stx_share s;
        s.x = x;
        s.begin = s.thread = 0;
        s.end = n;
        part(&s, job);
    }
    stx__fp_leave(&was);
}

/* Divides the loop into up to four chunks per thread, so that other threads can take
   work from a delayed one. A chunk has at least 16384 operations, because each chunk
   has a fixed cost. */
STX_DEF void stx_parallel(stx_ctx *x, size_t n, size_t work, stx_part part, const void *job) {
    stx__parallel(x, n, STX_MIN(4 * (size_t)stx_threads(x), work / 16384), work, 0, part, job);
}

STX_DEF void stx_parallel_units(stx_ctx *x, size_t n, stx_part part, const void *job) {
    stx__parallel(x, n, n, SIZE_MAX, 1, part, job);
}

/* Allocates the scratch memory and creates the thread pool. A context on a GPU needs
   neither, because its host computes nothing. If the allocation fails in stx_create,
   stx_begin tries again. */
static void stx__make_scratch(stx_ctx *x) {
    if (stx__on_gpu(x)) return;
    x->threads.scratch =
        (stx_real *)stx_persist(x, stx_bytes_of((size_t)x->desc.threads, STX__SCRATCH,
                                                sizeof(stx_real)));
    stx__pool_make(x);
}


// >>begin

STX_DEF void stx_begin(stx_ctx *x, int mode) {
    if (!x) return;
    /* The scratch buffer is missing only if its allocation failed and the caller
       cleared the error. */
    if (!x->threads.scratch) stx__make_scratch(x);
    stx__arena_rewind(&x->mem.step);
    stx__arena_rewind(&x->mem.dev_step);
    stx__arena_rewind(&x->mem.dev_bytes);
    stx__free_from_last_step(x);

    x->tape.last = NULL;
    x->tape.free_grads = x->tape.free_entries = NULL;
    x->tape.steps_begun++;
    x->tape.mode = mode;
    x->tape.recording = mode == STX_TRAIN;
    x->rng.op = x->rng.part = 0;
    if (mode == STX_TRAIN) x->rng.step++;
}

STX_DEF void stx_begin_part(stx_ctx *x, size_t part) {
    stx_begin(x, STX_TRAIN);
    if (!x || !part) return;
    x->rng.part = part;
    x->rng.step--;
}
