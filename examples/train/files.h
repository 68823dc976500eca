#pragma once
#include "base.h"
#include "buffer.h"


// >>files: replacing whole files, exclusive access, appending, directories

/* Calls write(2) until everything is written. Restarts after EINTR, because our signal
   handlers (without SA_RESTART) interrupt system calls; stdio would then lose data.
   Returns 0 with errno set on failure. */
TR_DEF int tr_write_all(int fd, const void *bytes, size_t n) {
    const char *p = (const char *)bytes;
    while (n > 0) {
        ssize_t k = write(fd, p, n);
        if (k < 0 && errno == EINTR) continue;
        if (k < 0) return 0;
        if (k == 0) {
            errno = ENOSPC;
            return 0;
        }
        p += k;
        n -= (size_t)k;
    }
    return 1;
}

/* Removes an open file. On POSIX, the file is removed before it is closed, so that no
   other process can lock it in between. Windows can remove only closed files. */
TR_DEF void tr_unlink_open(const char *path, int *fd) {
#ifdef _WIN32
    if (*fd >= 0) close(*fd);
    *fd = -1;
#else
    (void)fd;
#endif
    unlink(path);
}

/* Connects closed standard streams to /dev/null, so that the next file that is opened
   does not get one of their descriptors and receive the program's output. Reads and
   writes on these streams fail, so lost output is still reported as an error. Call this
   at the start of main. (Windows reserves the three descriptors.) */
TR_DEF void tr_standard_streams(void) {
#ifndef _WIN32
    int fd;
    for (fd = 0; fd < 3; fd++) {
        if (fcntl(fd, F_GETFD) >= 0 || errno != EBADF) continue;
        if (open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY) != fd) return;
    }
#endif
}

/* Returns the last component of path. */
TR_DEF const char *tr_name_of(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash != NULL ? slash + 1 : path;
}

/* Returns "dir/." for "dir/name", and "." for "name". The caller frees it. Returns NULL
   if memory runs out. */
TR_DEF char *tr_dir_of(const char *path) {
    size_t n = (size_t)(tr_name_of(path) - path);
    char *dir = (char *)malloc(n + 2);
    if (dir == NULL) return NULL;
    memcpy(dir, path, n);
    memcpy(dir + n, ".", 2);
    return dir;
}

/* Returns the maximum length of a file name in the directory of path. */
TR_DEF size_t tr_name_max(const char *path) {
    long n = -1;
#ifndef _WIN32
    char *dir = tr_dir_of(path);
    if (dir != NULL) n = pathconf(dir, _PC_NAME_MAX);
    free(dir);
#else
    (void)path;
#endif
    return n > 0 ? (size_t)n : 255;
}

/* Returns path with mark appended. If the file name would become too long, a hash
   replaces the end of the old name. The caller frees the result. Returns NULL if memory
   runs out. */
TR_DEF char *tr_path_next_to(const char *path, const char *mark) {
    const char *name = tr_name_of(path);
    size_t dir = (size_t)(name - path), n = strlen(name), k = strlen(mark);
    size_t most = tr_name_max(path), capacity = dir + n + k + 16;
    char hash[16] = "", *out = (char *)malloc(capacity);
    if (out == NULL) return NULL;
    if (n + k > most && most > k + 16) {
        snprintf(hash, sizeof hash, "~%08" PRIx32, (uint32_t)tr_hash(TR_HASH_BEGIN, name, n));
        n = most - k - strlen(hash);
        /* do not cut inside a UTF-8 sequence */
        while (n > 0 && ((unsigned char)name[n] & 0xC0) == 0x80) n--;
    }
    snprintf(out, capacity, "%.*s%s%s", (int)(dir + n), path, hash, mark);
    return out;
}

/* Returns the path at the end of a chain of symbolic links; the file need not exist.
   The caller frees it. Returns NULL with errno set on failure. (realpath is not in base
   POSIX.) */
TR_DEF char *tr_resolve_links(const char *path) {
    char link[4096], *here = strdup(path), *next;
    size_t dir;
    ssize_t n;
    int hops = 0, why;
    while (here != NULL) {
        n = readlink(here, link, sizeof link);
        if (n < 0 && (errno == EINVAL || errno == ENOENT)) return here;     /* not a link */
        if (n < 0 || ++hops == 40) {
            why = n < 0 ? errno : ELOOP;
            free(here);
            errno = why;
            return NULL;
        }

        /* a relative target starts from the directory of the link */
        dir = link[0] != '/' ? (size_t)(tr_name_of(here) - here) : 0;
        next = (char *)malloc(dir + (size_t)n + 1);
        if (next != NULL) {
            memcpy(next, here, dir);
            memcpy(next + dir, link, (size_t)n);
            next[dir + (size_t)n] = 0;
        }
        free(here);
        here = next;
    }
    return NULL;
}

/* Locks an open file until this process closes any descriptor of the file, or ends.
   Returns 1 if the file is locked, 0 if another process holds the lock, and -1 if the
   file system does not support locks. *pid receives the process that holds the lock, or
   0 if it is unknown. */
TR_DEF int tr_lock(int fd, long *pid) {
#ifdef _WIN32
    *pid = 0;
    return tr_win_lock(fd);
#else
    struct flock l;
    *pid = 0;
    memset(&l, 0, sizeof l);
    l.l_type = F_WRLCK;
    l.l_whence = SEEK_SET;
    if (fcntl(fd, F_SETLK, &l) == 0) return 1;
    if (errno != EACCES && errno != EAGAIN) return -1;
    if (fcntl(fd, F_GETLK, &l) == 0 && l.l_type != F_UNLCK && l.l_pid > 0) *pid = (long)l.l_pid;
    return 0;
#endif
}

/* Like tr_lock, but for a file that was opened only for reading. The lock is shared,
   but the function also returns 0 if another process has a shared lock. */
TR_DEF int tr_lock_read_only(int fd, long *pid) {
#ifdef _WIN32
    (void)fd;
    *pid = 0;
    return -1;
#else
    struct flock l;
    int got;
    *pid = 0;
    memset(&l, 0, sizeof l);
    l.l_type = F_RDLCK;
    l.l_whence = SEEK_SET;
    got = fcntl(fd, F_SETLK, &l) == 0;
    if (!got && errno != EACCES && errno != EAGAIN) return -1;
    l.l_type = F_WRLCK;
    if (fcntl(fd, F_GETLK, &l) != 0) return -1;
    if (l.l_type != F_UNLCK && l.l_pid > 0) *pid = (long)l.l_pid;
    return got && l.l_type == F_UNLCK;
#endif
}

/* Creates a new file and locks it. Removes an existing regular file that no process has
   locked, because a killed process left it behind. Returns -1 with errno set on
   failure; EEXIST means that the name is in use. */
TR_DEF int tr_open_new(const char *path, int mode) {
    struct stat st;
    long pid;
    int fd, round, stale;
    for (round = 0; round < 3; round++) {
        fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode);
        if (fd >= 0) {
            /* if these checks fail, another process has locked and removed the new
               file: retry */
            if (tr_lock(fd, &pid) != 0 && fstat(fd, &st) == 0 && st.st_nlink > 0) return fd;
            close(fd);
            continue;
        }
        if (errno != EEXIST || lstat(path, &st) != 0 || !S_ISREG(st.st_mode)) return -1;
        fd = open(path, O_WRONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
        stale = fd >= 0 && tr_lock(fd, &pid) == 1;
        if (stale) tr_unlink_open(path, &fd);
        if (fd >= 0) close(fd);
        if (!stale) break;
    }
    errno = EEXIST;
    return -1;
}

/* Makes a rename durable if the system can flush directories. */
TR_DEF void tr_flush_dir_of(const char *path) {
#ifndef _WIN32
    char *dir = tr_dir_of(path);
    int fd = dir != NULL ? open(dir, O_RDONLY | O_CLOEXEC) : -1;
    if (fd >= 0) {
        if (fsync(fd) != 0) errno = 0;
        close(fd);
    }
    free(dir);
#else
    (void)path;
#endif
}

/* Creates a file or replaces its contents. After a kill, a full disk or an error, the
   file has either its old or its new contents. Symbolic links are followed, and the
   file mode is kept. The new contents are first written to NAME.<n>.tmp in the same
   directory. A file of this kind that a killed process left behind is removed. */
TR_DEF int tr_replace(const char *path, const void *bytes, size_t n, char *err, size_t size) {
    struct stat st;
    char mark[16], *real = tr_resolve_links(path), *temp = NULL;
    int fd = -1, k, there, ok, why;
    if (real == NULL) return tr_fail(err, size, "%s: %s", path, strerror(errno));
    there = stat(real, &st) == 0;
    for (k = 0; k < 100 && fd < 0; k++) {
        free(temp);
        snprintf(mark, sizeof mark, ".%d.tmp", k);
        temp = tr_path_next_to(real, mark);
        if (temp == NULL) break;
        fd = tr_open_new(temp, there ? 0600 : 0666);
        if (fd < 0 && errno != EEXIST) break;
    }

    ok = fd >= 0 && (!there || fchmod(fd, st.st_mode & 0777) == 0) && tr_write_all(fd, bytes, n)
         && fsync(fd) == 0;
    why = temp == NULL ? ENOMEM : errno;
#ifdef _WIN32
    if (ok && close(fd) != 0) {         /* Windows cannot rename an open file */
        ok = 0;
        why = errno;
    }
    if (ok) fd = -1;
#endif
    if (ok && rename(temp, real) != 0) {
        ok = 0;
        why = errno;
    }
    if (!ok && fd >= 0) tr_unlink_open(temp, &fd);
    if (fd >= 0) close(fd);     /* last, because closing the file releases the lock */

    if (ok)
        tr_flush_dir_of(real);
    else
        tr_fail(err, size, "%s: cannot write: %s", path, strerror(why));
    free(temp);
    free(real);
    return ok;
}

/* The exclusive right to write a file. It is a lock on FILE.lock in the same directory,
   because the file itself is replaced at each save. The lock is released when the
   process ends. A FILE.lock that a killed process left behind does not block other
   runs, and the next run removes it. */
typedef struct {
    int   fd;       /* -1 if nothing is claimed */
    char *path;     /* path of the lock file */
} tr_claim;

/* Returns the path of FILE.lock, after following links. Returns NULL with errno 0 if
   the file is a pipe or a device, which cannot be claimed. */
TR_DEF char *tr_claim_path(const char *path) {
    struct stat st;
    char *real, *lock;
    errno = 0;
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode)) return NULL;
    real = tr_resolve_links(path);
    if (real == NULL) return NULL;
    lock = tr_path_next_to(real, ".lock");
    free(real);
    errno = lock == NULL ? ENOMEM : 0;
    return lock;
}

TR_DEF int tr_refuse_claimed(const char *option, const char *path, long pid, char *err,
                             size_t size) {
    char who[64] = "";
    if (pid > 0) snprintf(who, sizeof who, " (process %ld)", pid);
    return tr_fail(err, size,
                   "--%s %.900s: another run%s is writing this file: wait until that run ends, or "
                   "name another file", option, path, who);
}

/* Nonzero if an open file can be a lock: an empty regular file. */
TR_DEF int tr_is_lock(int fd) {
    struct stat st;
    return fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size == 0;
}

TR_DEF int tr_refuse_not_lock(const char *option, const char *path, const char *lock, char *err,
                              size_t size) {
    return tr_fail(err, size,
                   "--%s %.400s: %.400s is not the lock file of a run: rename it, or name another "
                   "output file", option, path, lock);
}

/* Returns 1 if the file can be claimed. If another process has claimed it, or if
   FILE.lock is not a lock file, sets err and returns 0. Does not claim or write
   anything. */
TR_DEF int tr_unclaimed(const char *option, const char *path, char *err, size_t size) {
    const int flags = O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
    char *lock = tr_claim_path(path);
    long pid = 0;
    int fd = -1, ok = 1, reads;
    if (lock != NULL) fd = open(lock, O_RDWR | flags);
    reads = lock != NULL && fd < 0 && errno == EACCES;      /* another user's lock file */
    if (reads) fd = open(lock, O_RDONLY | flags);
    if (fd >= 0) {
        if (!tr_is_lock(fd)) ok = tr_refuse_not_lock(option, path, lock, err, size);
        else if ((reads ? tr_lock_read_only(fd, &pid) : tr_lock(fd, &pid)) == 0)
            ok = tr_refuse_claimed(option, path, pid, err, size);
        close(fd);
    }
    free(lock);
    return ok;
}

TR_DEF int tr_refuse_lock(const tr_claim *c, const char *option, int why, char *err, size_t size) {
    return tr_fail(err, size, "--%s: cannot create the lock file %.900s: %s", option, c->path,
                   strerror(why));
}

/* Removes a lock file that this process cannot write because it belongs to another
   user, if that user's run has ended. Returns -1 if it was removed; otherwise, sets err
   and returns 0. A shared lock prevents other runs from claiming the file in the
   meantime. */
TR_DEF int tr_claim_from_user(const tr_claim *c, const char *option, const char *path, char *err,
                              size_t size) {
    struct stat st;
    long pid = 0;
    int fd = open(c->path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC), why = errno, got = -1;
    if (fd < 0 && why == ENOENT) return tr_refuse_lock(c, option, EACCES, err, size);
    if (fd >= 0 && !tr_is_lock(fd)) {
        close(fd);
        return tr_refuse_not_lock(option, path, c->path, err, size);
    }
    if (fd >= 0) {
        got = tr_lock_read_only(fd, &pid);
        /* if st_nlink is 0, another run has already removed the file */
        if (got > 0 && fstat(fd, &st) == 0 && st.st_nlink > 0 && unlink(c->path) != 0) got = -1;
        why = errno;
        close(fd);
    }
    if (got > 0) return -1;
    if (got == 0) return tr_refuse_claimed(option, path, pid, err, size);
    return tr_fail(err, size,
                   "--%s: the lock file %.700s belongs to another user and cannot be removed (%s): "
                   "if that user's run has ended, ask the user to remove it, or name another file",
                   option, c->path, strerror(why));
}

/* Tries once to claim the file. Returns 1 on success, and 0 with err set if the file
   cannot be claimed. Returns -1 if the lock of a run that has ended was removed: try
   again. */
TR_DEF int tr_claim_try(tr_claim *c, const char *option, const char *path, char *err, size_t size) {
    struct stat st;
    long pid = 0;
    int got = 0;
    c->fd = open(c->path, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
    if (c->fd < 0 && errno == EACCES) return tr_claim_from_user(c, option, path, err, size);
    if (c->fd < 0) return tr_refuse_lock(c, option, errno, err, size);
    if (!tr_is_lock(c->fd)) {
        tr_refuse_not_lock(option, path, c->path, err, size);
    } else {
        got = tr_lock(c->fd, &pid);
        if (got < 0) return 1;      /* without lock support nothing can be claimed */
        if (got && fstat(c->fd, &st) == 0 && st.st_nlink > 0) return 1;
        if (!got) tr_refuse_claimed(option, path, pid, err, size);
    }
    close(c->fd);
    c->fd = -1;
    return got ? -1 : 0;
}

/* Claims a file; path may be NULL. On failure, sets err, returns 0, and claims
   nothing. */
TR_DEF int tr_claim_open(tr_claim *c, const char *option, const char *path, char *err,
                         size_t size) {
    int got = -1, round;
    c->fd = -1;
    c->path = path != NULL ? tr_claim_path(path) : NULL;
    if (c->path == NULL && (path == NULL || errno == 0)) return 1;
    if (c->path == NULL)
        return tr_fail(err, size, "--%s %.900s: %s", option, path, strerror(errno));

    for (round = 0; round < 100 && got < 0; round++)
        got = tr_claim_try(c, option, path, err, size);
    if (got > 0) return 1;
    if (got < 0) tr_refuse_lock(c, option, EAGAIN, err, size);
    free(c->path);
    c->path = NULL;
    return 0;
}

TR_DEF void tr_claim_close(tr_claim *c) {
    if (c->path != NULL) {
        tr_unlink_open(c->path, &c->fd);
        if (c->fd >= 0) close(c->fd);
    }
    free(c->path);
    c->path = NULL;
    c->fd = -1;
}

/* Reads up to `size` bytes from the start of a file. Returns their number, or 0 if the
   file cannot be read. */
TR_DEF size_t tr_first_bytes(const char *path, char *out, size_t size) {
    FILE *f = fopen(path, "rb");
    size_t n;
    if (f == NULL) return 0;
    n = fread(out, 1, size, f);
    fclose(f);
    return n;
}

/* Creates a directory and its missing parents. */
TR_DEF int tr_mkdirs(const char *dir, char *err, size_t size) {
    size_t n = strlen(dir), i;
    struct stat st;
    char *path = strdup(dir);
    int why;
    if (path == NULL)
        return tr_fail(err, size, "%s: out of memory: cannot create the directory", dir);
    if (n == 0) {
        free(path);
        return tr_fail(err, size, "expected the name of a directory, got ''");
    }

    for (i = 1; i <= n; i++) {
        if (path[i] != '/' && path[i] != 0) continue;
        path[i] = 0;
        why = mkdir(path, 0777) != 0 ? errno : 0;
        /* an existing directory is not an error */
        if (why && (stat(path, &st) != 0 || !S_ISDIR(st.st_mode))) {
            tr_fail(err, size, "%s: cannot create the directory %s: %s", dir, path,
                    strerror(why == EEXIST ? ENOTDIR : why));
            free(path);
            return 0;
        }
        path[i] = dir[i];
    }
    free(path);
    return 1;
}

/* Checks in advance that a file can be written, so that saving does not fail after
   hours of training. The directory must exist and be writable, and the path must be
   short enough for the names of temporary files. An existing file must be a regular
   file; if streams is 1, it can also be a pipe or a device. */
TR_DEF int tr_can_write(const char *option, const char *path, int streams, char *err, size_t size) {
    const size_t longest = 4096 - 64;           /* leaves space for suffixes such as .lock */
    struct stat link, target;
    char *dir;
    int why = 0;
    if (!*path) return tr_fail(err, size, "--%s: expected the name of a file, got ''", option);
    if (strlen(path) > longest)
        return tr_fail(err, size, "--%s: expected a path of at most %zu characters, got %zu",
                       option, longest, strlen(path));
    if (lstat(path, &link) == 0 && S_ISLNK(link.st_mode) && stat(path, &target) != 0)
        return tr_fail(err, size, "--%s %s is a symbolic link to a file that does not exist",
                       option, path);

    dir = tr_dir_of(path);
    if (dir == NULL)
        return tr_fail(err, size, "--%s %s: out of memory: cannot check the path", option, path);
    if (access(dir, W_OK | X_OK) != 0 || (access(path, W_OK) != 0 && errno != ENOENT)) why = errno;
    free(dir);
    if (why == ENOENT)
        return tr_fail(err, size, "--%s %s: the directory does not exist: create it first", option,
                       path);
    if (why)
        return tr_fail(err, size, "--%s %s: cannot write to this file: %s", option, path,
                       strerror(why));

    if (stat(path, &target) != 0 || S_ISREG(target.st_mode)) return 1;
    if (S_ISDIR(target.st_mode))
        return tr_fail(err, size, "--%s %s: expected a file, got a directory", option, path);
    if (streams) return 1;
    return tr_fail(err, size, "--%s %s: expected a regular file, got a pipe or a device", option,
                   path);
}

/* Returns the path of a file in a directory. The caller frees it. Returns NULL if memory
   runs out. */
TR_DEF char *tr_path_in(const char *dir, const char *name) {
    const size_t n = strlen(dir), size = n + strlen(name) + 2;
    char *out = (char *)malloc(size);
    if (out) snprintf(out, size, "%s%s%s", dir, n && dir[n - 1] == '/' ? "" : "/", name);
    return out;
}

/* Inserts mark before the extension: "dir/run.st" and ".best" give "dir/run.best.st".
   If the name has no extension, appends mark. The caller frees the result. Returns NULL
   if memory runs out. */
TR_DEF char *tr_path_with(const char *path, const char *mark) {
    size_t n = strlen(path), k = strlen(mark);
    const char *name = tr_name_of(path), *dot = strrchr(name, '.');
    char *out = (char *)malloc(n + k + 1);
    if (out == NULL) return NULL;
    /* a leading dot marks a hidden file, not an extension */
    if (dot == NULL || dot == name) dot = path + n;
    memcpy(out, path, (size_t)(dot - path));
    memcpy(out + (dot - path), mark, k);
    memcpy(out + (dot - path) + k, dot, (size_t)(path + n - dot) + 1);
    return out;
}

/* A file to which whole records are appended. If a record cannot be written completely
   (disk full), the part that was written is removed, so that the file remains readable,
   and nothing more is written. */
typedef struct {
    int   fd;           /* -1 if closed, unused or failed */
    int   regular;      /* 1: a regular file, from which a partial record can be removed */
    off_t end;
    char *path;
} tr_appender;

/* Appends a record. Returns 0 and sets err for the first record that cannot be written,
   and 1 otherwise. Later records are dropped. */
TR_DEF int tr_append(tr_appender *a, const void *bytes, size_t n, char *err, size_t size) {
    int why;
    if (a->fd < 0) return 1;
    if (tr_write_all(a->fd, bytes, n)) {
        a->end += (off_t)n;
        return 1;
    }
    why = errno;
    if (a->regular && ftruncate(a->fd, a->end) != 0)
        tr_fail(err, size, "%s: write failed (%s), and the partial record cannot be removed: %s",
                a->path, strerror(why), strerror(errno));
    else
        tr_fail(err, size, "%s: write failed, so later records are dropped: %s", a->path,
                strerror(why));
    close(a->fd);
    a->fd = -1;
    return 0;
}

TR_DEF int tr_append_open(tr_appender *a, const char *path, int flags, char *err, size_t size) {
    struct stat st;
    memset(a, 0, sizeof *a);
    a->fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | flags, 0666);
    if (a->fd < 0) {
        int why = errno;
        tr_fail(err, size, "%s: cannot open for writing: %s", path, strerror(why));
        errno = why;        /* tr_board_open checks for EEXIST */
        return 0;
    }

    a->path = strdup(path);
    if (a->path == NULL || fstat(a->fd, &st) != 0) {
        tr_fail(err, size, "%s: cannot open for writing: %s", path, strerror(errno));
        close(a->fd);
        free(a->path);
        a->path = NULL;
        a->fd = -1;
        return 0;
    }
    a->regular = S_ISREG(st.st_mode);
    a->end = st.st_size;
    return 1;
}

TR_DEF int tr_append_close(tr_appender *a, char *err, size_t size) {
    int ok = 1;
    /* NFS reports a full disk only when the file is closed. */
    if (a->fd >= 0 && close(a->fd) != 0 && errno != EINTR)
        ok = tr_fail(err, size, "%s: close failed: %s", a->path, strerror(errno));
    a->fd = -1;
    free(a->path);
    a->path = NULL;
    return ok;
}
