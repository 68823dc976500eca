/* trainer_kill.c - a library to preload into the trainer (tests/trainer.sh): it counts
   the calls that change files, and ends the process, or fills the disk, at one of them.

       cc -shared -fPIC trainer_kill.c -o trainer_kill.so -ldl
       TRAINER_COUNT=FILE   LD_PRELOAD=./trainer_kill.so trainer ...      writes the number of calls to FILE at exit
       TRAINER_DIE_AT=N     ...     SIGKILL at call N; a write is done by half before
       TRAINER_FULL_AT=N    ...     from call N on, writes give ENOSPC; the first one is done by half before
       TRAINER_FILE=TEXT    ...     only calls on files whose names have TEXT

   Counted are write, fsync, rename and unlink; not what goes to the terminal
   (descriptors 0 to 2). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static long calls, die_at, full_at;
static int asked;

static void ask(void) {
    const char *s;
    if (asked) return;
    asked = 1;
    if ((s = getenv("TRAINER_DIE_AT")) != NULL) die_at = atol(s);
    if ((s = getenv("TRAINER_FULL_AT")) != NULL) full_at = atol(s);
}

/* Is it one of TRAINER_FILE? path NULL: what descriptor fd is of */
static int meant(const char *path, int fd) {
    const char *only = getenv("TRAINER_FILE");
    char link[64], name[4096];
    ssize_t n;
    if (!only || path) return !only || strstr(path, only) != NULL;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    n = readlink(link, name, sizeof name - 1);
    if (n < 0) return 0;
    name[n] = 0;
    return strstr(name, only) != NULL;
}

static void count(void) {
    ask();
    if (++calls == die_at) raise(SIGKILL);
}

ssize_t write(int fd, const void *data, size_t n) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "write");
    if (fd <= 2 || !meant(NULL, fd)) return real(fd, data, n);
    ask();
    calls++;
    if (calls == die_at) {
        if (real(fd, data, n / 2) < 0) raise(SIGKILL);
        raise(SIGKILL);
    }
    if (full_at && calls >= full_at) {
        if (calls == full_at && n > 1) return real(fd, data, n / 2);
        errno = ENOSPC;
        return -1;
    }
    return real(fd, data, n);
}

int fsync(int fd) {
    static int (*real)(int);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "fsync");
    if (meant(NULL, fd)) count();
    return real(fd);
}

int rename(const char *from, const char *to) {
    static int (*real)(const char *, const char *);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "rename");
    if (meant(from, 0)) count();
    return real(from, to);
}

int unlink(const char *path) {
    static int (*real)(const char *);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "unlink");
    if (meant(path, 0)) count();
    return real(path);
}

__attribute__((destructor)) static void tell(void) {
    const char *path = getenv("TRAINER_COUNT");
    FILE *f = path ? fopen(path, "w") : NULL;
    if (!f) return;
    fprintf(f, "%ld\n", calls);
    fclose(f);
}
