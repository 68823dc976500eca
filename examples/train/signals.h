#pragma once
#include "base.h"


// >>signals: an orderly stop

/* After the first SIGINT, SIGTERM or SIGHUP, the training loop finishes its step, saves
   and exits. A second signal ends the process immediately, with status 128 + its
   number. If stopping would lose the run (tr_signals with ask = 1), the first SIGINT
   only prints a warning, and a second one within TR_ASK_SECONDS requests the stop. */

#define TR_ASK_SECONDS 5

static volatile sig_atomic_t tr_stop_signal TR_UNUSED = 0;
static volatile sig_atomic_t tr_ask TR_UNUSED = 0;      /* 1: the first SIGINT only warns */
static struct timespec tr_asked TR_UNUSED;                /* time of the warning; 0 if none */

TR_DEF void tr_on_signal(int sig) {
    static const char warn[] =
        "\r\033[Knothing will be saved: press Ctrl-C again within 5 seconds to stop\n";
    struct timespec now;
    int why = errno;
    if (tr_stop_signal != 0) {
        if (sig == SIGHUP) return;      /* a closing terminal sends SIGHUP several times */
        _exit(128 + sig);
    }
    if (sig == SIGINT && tr_ask && clock_gettime(CLOCK_MONOTONIC, &now) == 0) {
        double since = (double)(now.tv_sec - tr_asked.tv_sec)
                       + 1e-9 * (double)(now.tv_nsec - tr_asked.tv_nsec);
        int first = (tr_asked.tv_sec == 0 && tr_asked.tv_nsec == 0) || since > TR_ASK_SECONDS;
        tr_asked = now;
        if (first && write(2, warn, sizeof warn - 1) > 0) {
            errno = why;
            return;
        }
    }
    tr_stop_signal = sig;
    errno = why;
}

/* Installs the handlers without SA_RESTART, so that a blocking read or wait returns
   with EINTR and the loop notices the request. Each handler blocks the other
   signals. */
TR_DEF int tr_signals(int ask, char *err, size_t size) {
#ifdef SIGUSR1
    /* mpirun forwards SIGUSR1, and srun --signal can send it */
    static const int which[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1};
#else
    static const int which[] = {SIGINT, SIGTERM, SIGHUP};
#endif
    const int count = (int)(sizeof which / sizeof *which);
    struct sigaction act, was;
    int i;
    memset(&act, 0, sizeof act);
    act.sa_handler = tr_on_signal;
    sigemptyset(&act.sa_mask);
    for (i = 0; i < count; i++) sigaddset(&act.sa_mask, which[i]);
    tr_ask = ask;
    for (i = 0; i < count; i++) {
        if (which[i] == SIGHUP && sigaction(SIGHUP, NULL, &was) == 0 && was.sa_handler == SIG_IGN)
            continue;       /* started by nohup */
        if (sigaction(which[i], &act, NULL) != 0)
            return tr_fail(err, size, "cannot install a signal handler: %s", strerror(errno));
    }
    return 1;
}

/* Returns the number of the signal that requested a stop, or 0. */
TR_DEF int tr_stop_requested(void) {
    return (int)tr_stop_signal;
}

/* Clears the request to stop, for a program that stops only the current operation and
   then continues. */
TR_DEF void tr_stop_done(void) {
    tr_stop_signal = 0;
}

/* Memory-mapped files, whose length must not change. If one is truncated, reads after
   its new end return zeros or raise SIGBUS. */
enum { TR_WATCHED = 3 };

static struct {
    const char *program, *path[TR_WATCHED];
    struct stat at[TR_WATCHED];     /* status of each file when watching began */
    int         n;
} tr_watched TR_UNUSED;

/* Returns the first watched file that has become shorter, or NULL. A new file of the
   same name is harmless, because the old one stays mapped. */
TR_DEF const char *tr_cut_short(void) {
    struct stat st;
    int i;
    for (i = 0; i < tr_watched.n; i++) {
        const struct stat *was = &tr_watched.at[i];
        if (stat(tr_watched.path[i], &st) != 0) continue;
        if (st.st_dev != was->st_dev || st.st_ino != was->st_ino) continue;
        if (st.st_size < was->st_size) return tr_watched.path[i];
    }
    return NULL;
}

#ifdef SIGBUS
/* Handles SIGBUS and calls only async-signal-safe functions. If no watched file was
   truncated, the signal ends the process as usual. */
TR_DEF void tr_on_bus(int sig) {
    const char *path = tr_cut_short();
    const char *const said[] = {
        "\n", tr_watched.program, ": the text ", path,
        " was truncated while it was being read; the last checkpoint is intact\n"
    };
    size_t i;
    if (path == NULL) {
        signal(sig, SIG_DFL);
        return;
    }
    for (i = 0; i < sizeof said / sizeof *said; i++)
        if (write(2, said[i], strlen(said[i])) < 0) break;
    _exit(1);
}
#endif

/* Watches a file for truncation. The string `path` is not copied. Sets err and returns 0
   on failure. */
TR_DEF int tr_watch(const char *program, const char *path, char *err, size_t size) {
#ifdef SIGBUS
    if (tr_watched.n == TR_WATCHED || stat(path, &tr_watched.at[tr_watched.n]) != 0)
        return tr_fail(err, size, "%s: %s", path, strerror(errno));
    tr_watched.program = program;
    tr_watched.path[tr_watched.n++] = path;
    signal(SIGBUS, tr_on_bus);
#else
    (void)program;          /* Windows refuses to truncate a mapped file */
    (void)path;
    (void)err;
    (void)size;
#endif
    return 1;
}
