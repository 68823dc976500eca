/* trainer_kill.c - a library that trainer.sh preloads into the trainer. It counts
   the calls that change files. At a chosen call it kills the process or simulates a full
   disk.

       cc -shared -fPIC trainer_kill.c -o trainer_kill.so -ldl
       TRAINER_COUNT=FILE LD_PRELOAD=./trainer_kill.so trainer ...

   TRAINER_COUNT=FILE  writes the number of calls to FILE at exit
   TRAINER_DIE_AT=N    raises SIGKILL at call N; if call N is a write, half of its data
                       is written first
   TRAINER_FULL_AT=N   makes writes fail with ENOSPC from call N on, except that call N
                       writes half of its data
   TRAINER_FILE=TEXT   counts only calls on files whose names contain TEXT

   Counted calls are write, fsync, rename and unlink. Writes to descriptors 0 to 2 are not
   counted. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static long calls, die_at, full_at;

static void read_settings(void) {
    static int done;
    const char *s;
    if (done) return;
    done = 1;
    if ((s = getenv("TRAINER_DIE_AT")) != NULL) die_at = atol(s);
    if ((s = getenv("TRAINER_FULL_AT")) != NULL) full_at = atol(s);
}

/* Returns whether TRAINER_FILE selects the file path or, if path is NULL,
   descriptor fd. */
static int selected(const char *path, int fd) {
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
    read_settings();
    if (++calls == die_at) raise(SIGKILL);
}

ssize_t write(int fd, const void *data, size_t n) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "write");
    if (fd <= 2 || !selected(NULL, fd)) return real(fd, data, n);
    read_settings();
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
    if (selected(NULL, fd)) count();
    return real(fd);
}

int rename(const char *from, const char *to) {
    static int (*real)(const char *, const char *);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "rename");
    if (selected(from, 0)) count();
    return real(from, to);
}

int unlink(const char *path) {
    static int (*real)(const char *);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "unlink");
    if (selected(path, 0)) count();
    return real(path);
}

__attribute__((destructor)) static void write_count(void) {
    const char *path = getenv("TRAINER_COUNT");
    FILE *f = path ? fopen(path, "w") : NULL;
    if (!f) return;
    fprintf(f, "%ld\n", calls);
    fclose(f);
}
