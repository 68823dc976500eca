#pragma once
#include "../api/context.h"
#include "../core/platform.h"
#include "../core/text.h"
#include "map.h"


// >>files: atomic replacement

typedef struct stx__file_part {
    const void *data;
    size_t bytes;
} stx__file_part;

/* Returns the length of the prefix that a path shares with its temporary files: the
   whole path, unless the file name is longer than 100 bytes. Longer names are
   truncated, because .<pid>.<n>.tmp adds up to 29 bytes and some file systems limit
   names to 143 bytes. Truncation does not split a UTF-8 character, which some file
   systems would reject. */
static size_t stx__stem(const char *path) {
    const char *base = path, *p;
    size_t most = 100;
    for (p = path; *p; p++) {
        if (*p == '/') base = p + 1;
#ifdef _WIN32
        if (*p == '\\' || *p == ':') base = p + 1;
#endif
    }
    if ((size_t)(p - base) <= most) return (size_t)(p - path);
    while (most > 96 && ((unsigned char)base[most] & 0xC0) == 0x80) most--;
    return (size_t)(base - path) + most;
}

static void stx__cannot_replace(stx_ctx *x, const char *path, int code) {
    stx_fail(x, STX_ERR_IO,
             "cannot write %s: %s; any existing file of this name is unchanged. Free some disk "
             "space or choose another path", path, strerror(code));
}

#ifdef STX__POSIX

/* Follows symbolic links at the last component of a path. Returns the target's path, to
   be freed with stx_block_free, or NULL after an error. The target need not exist. */
static char *stx__follow(stx_ctx *x, const char *path) {
    enum { CAPACITY = 4096, HOPS = 40 };

    char *at = stx__copy(x, path), *link = (char *)stx_block(x, CAPACITY), *next;
    int hop;
    for (hop = 0; at && link; hop++) {
        const char *slash = strrchr(at, '/');
        size_t dir = slash ? (size_t)(slash - at) + 1 : 0, n;
        ssize_t got = readlink(at, link, CAPACITY);
        if (got < 0) {
            /* not a link, or nothing with this name exists */
            if (errno == EINVAL || errno == ENOENT || errno == ENOSYS || errno == ENOTSUP) break;
            stx_fail(x, STX_ERR_IO, "cannot examine %s: %s; check the path and its permissions",
                     path, strerror(errno));
            stx_block_free(x, at);
            at = NULL;
            break;
        }
        if (hop == HOPS || got == CAPACITY) {
            stx_fail(x, STX_ERR_IO,
                     "cannot write %s: its chain of symbolic links is circular or too long", path);
            got = -1;
        }
        n = got < 0 ? 0 : (size_t)got;
        if (n && link[0] == '/') dir = 0;   /* an absolute link replaces the whole path */
        next = got < 0 ? NULL : (char *)stx_block(x, dir + n + 1);
        if (next) {
            memcpy(next, at, dir);
            memcpy(next + dir, link, n);
        }
        stx_block_free(x, at);
        at = next;
    }
    if (!link) {
        stx_block_free(x, at);
        at = NULL;
    }
    stx_block_free(x, link);
    return at;
}

static int stx__write_all(int fd, const void *data, size_t n) {
    const char *p = (const char *)data;
    while (n) {
        ssize_t k = write(fd, p, n < ((size_t)1 << 30) ? n : (size_t)1 << 30);
        if (k < 0 && errno == EINTR) continue;
        if (k == 0) errno = ENOSPC;
        if (k <= 0) return 0;
        p += k;
        n -= (size_t)k;
    }
    return 1;
}

/* Flushes a file to the storage medium. On macOS, fsync leaves the data in the drive's
   cache, which is lost in a power failure. F_FULLFSYNC also flushes that cache, but not
   every file system supports it. */
static int stx__flush_file(int fd) {
  #ifdef F_FULLFSYNC
    if (fcntl(fd, F_FULLFSYNC) == 0) return 0;
  #endif
    return fsync(fd);
}

/* Flushes the target's directory, so that the rename survives a power failure. On file
   systems that cannot flush a directory, does nothing and succeeds. */
static int stx__sync_dir(stx_ctx *x, char *target) {
    char *slash = strrchr(target, '/'), keep = 0;
    const char *dir = ".";
    int fd, bad = 0;
    if (slash == target)
        dir = "/";
    else if (slash) {
        keep = *slash;
        *slash = 0;
        dir = target;
    }
    fd = stx__open(dir, O_RDONLY, 0);
    if (fd >= 0) {
        bad = fsync(fd) != 0 && errno != EINVAL && errno != ENOTSUP && errno != EROFS
              && errno != EBADF;
        if (bad)
            stx_fail(x, STX_ERR_IO,
                     "the new file is in place, but its directory %s cannot be flushed to disk: %s",
                     dir, strerror(errno));
        close(fd);
    }
    if (keep) *slash = keep;
    return !bad;
}

/* Locks a temporary file to mark it as being written. The system releases the lock when
   the process ends. Returns 0 if another process holds the lock or removed the file
   before it was locked. On a file system without locks, returns 1 and sets *has to 0, so
   that no stale file is removed. */
static int stx__lock_tmp(int fd, int *has) {
    struct flock l;
    struct stat st;
    memset(&l, 0, sizeof l);
    l.l_type = F_WRLCK;
    l.l_whence = SEEK_SET;
    *has = fcntl(fd, F_SETLK, &l) == 0;
    if (!*has) return errno != EACCES && errno != EAGAIN;
    if (fstat(fd, &st) != 0) return 0;
    if (!st.st_nlink) errno = EAGAIN;
    return st.st_nlink > 0;
}

/* Returns the pid in a name of the form BASE.<pid>.<n>.tmp, where BASE is the n bytes at
   base. Returns -1 for any other name. */
static long stx__tmp_pid(const char *name, const char *base, size_t n) {
    char *end;
    long pid;
    if (strncmp(name, base, n) != 0 || name[n] != '.' || name[n + 1] < '0' || name[n + 1] > '9')
        return -1;
    pid = strtol(name + n + 1, &end, 10);
    if (*end != '.' || end[1] < '0' || end[1] > '9') return -1;
    return strcmp(end + 1 + strspn(end + 1, "0123456789"), ".tmp") ? -1 : pid;
}

/* Removes a temporary file unless it is being written. A process cannot detect its own
   locks by trying to lock the file again. A file with this process's pid may therefore
   belong to another thread; it is removed only if it has not been written for an hour. */
static void stx__remove_tmp(const char *path, long pid) {
    struct stat st;
    int fd, has = 0;
    if (stat(path, &st) != 0 || !S_ISREG(st.st_mode)) return;
    if (pid == (long)getpid() && st.st_mtime >= time(NULL) - 3600) return;
    fd = stx__open(path, O_WRONLY | O_NONBLOCK, 0);
    if (fd < 0) return;
    if (stx__lock_tmp(fd, &has) && has) unlink(path);
    close(fd);
}

/* Removes the temporary files that killed processes left in the target's directory. */
static void stx__remove_stale(stx_ctx *x, const char *target) {
    const char *slash = strrchr(target, '/'), *base = slash ? slash + 1 : target;
    const size_t dir = (size_t)(base - target), n = stx__stem(target) - dir;
    struct dirent *e;
    DIR *d;
    char *path = (char *)stx_block(x, dir + 2);
    if (!path) return;
    memcpy(path, dir ? target : ".", dir ? dir : 1);
    d = opendir(path);
    stx_block_free(x, path);
    while (d && (e = readdir(d)) != NULL) {
        const long pid = stx__tmp_pid(e->d_name, base, n);
        size_t len = strlen(e->d_name);
        if (pid < 0) continue;
        path = (char *)stx_block(x, dir + len + 1);
        if (!path) break;
        if (dir) memcpy(path, target, dir);
        memcpy(path + dir, e->d_name, len + 1);
        stx__remove_tmp(path, pid);
        stx_block_free(x, path);
    }
    if (d) closedir(d);
}

/* Creates and locks a temporary file for the target. Writes its name to tmp, which has
   `size` bytes, and returns its descriptor, or -1 after an error. */
static int stx__open_tmp(stx_ctx *x, const char *target, char *tmp, size_t size, int mode) {
    size_t stem = stx__stem(target);
    struct stat st;
    int fd, k, locked, err = 0, refused = 0;
    memcpy(tmp, target, stem);
    for (k = 0; k < 1000 && refused < 16; k++) {
        snprintf(tmp + stem, size - stem, ".%ld.%d.tmp", (long)getpid(), k);
        fd = stx__open(tmp, O_WRONLY | O_CREAT | O_EXCL, mode);
        if (fd < 0 && errno == EEXIST) continue;
        if (fd < 0) {
            stx_fail(x, STX_ERR_IO,
                     "cannot create %s: %s; the directory must exist and be writable", tmp,
                     strerror(errno));
            return -1;
        }
        if (stx__lock_tmp(fd, &locked)) return fd;

        /* another process is removing the new file as stale: try the next name */
        err = errno;
        refused++;
        if (fstat(fd, &st) != 0 || st.st_nlink > 0) unlink(tmp);
        close(fd);
    }
    if (refused)
        stx_fail(x, STX_ERR_IO,
                 "cannot write %s: a temporary file in its directory cannot be locked: %s", target,
                 strerror(err));
    else
        stx_fail(x, STX_ERR_IO,
                 "cannot create %s: all %d temporary file names are in use; remove old *.tmp files",
                 tmp, k);
    return -1;
}

/* Copies the mode of the old file and, as far as the system permits, its owner and
   group. */
static int stx__keep_owner(int fd, const struct stat *old) {
    struct stat st;
    int kept = fstat(fd, &st) == 0 && st.st_uid == old->st_uid && st.st_gid == old->st_gid;
    if (!kept) kept = fchown(fd, old->st_uid, old->st_gid) == 0;
    if (!kept) kept = fchown(fd, (uid_t)-1, old->st_gid) == 0;
    return fchmod(fd, old->st_mode & 0777) == 0;
}

/* Writes the parts to the temporary file tmp, which is open as fd, and renames it to
   target. `old` describes the file to be replaced, or is NULL if there is none. Closes
   fd. Returns 0 or an errno value. */
static int stx__write_and_rename(int fd, const char *tmp, const char *target,
                                 const struct stat *old, const stx__file_part *part,
                                 size_t parts) {
    size_t i;
    int code = 0, bad = old && !stx__keep_owner(fd, old);
    for (i = 0; i < parts && !bad; i++) bad = !stx__write_all(fd, part[i].data, part[i].bytes);
    if (!bad) bad = stx__flush_file(fd) != 0;
    if (!bad) bad = rename(tmp, target) != 0;
    if (bad) code = errno ? errno : EIO;
    if (bad) unlink(tmp);
    /* close releases the lock, so it comes last. The data has been flushed, so errors
       from close can be ignored. */
    close(fd);
    return code;
}

/* Checks that the target can be replaced. Returns 1 if it exists, 0 if it does not, and
   -1 after an error. */
static int stx__examine_target(stx_ctx *x, const char *path, const char *target,
                               struct stat *st) {
    if (stat(target, st) != 0) {
        if (errno == ENOENT) return 0;
        stx_fail(x, STX_ERR_IO, "cannot examine %s: %s; check the path and its permissions", path,
                 strerror(errno));
        return -1;
    }
    if (!S_ISREG(st->st_mode)) {
        stx_fail(x, STX_ERR_IO, "cannot write %s: it is %s; use the path of a regular file", path,
                 S_ISDIR(st->st_mode) ? "a directory" : "not a regular file");
        return -1;
    }
    if (access(target, W_OK) != 0) {
        stx_fail(x, STX_ERR_IO,
                 "cannot write %s: it is write-protected (%s); choose another path or change its "
                 "permissions", path, strerror(errno));
        return -1;
    }
    return 1;
}

static int stx__replace(stx_ctx *x, const char *path, const stx__file_part *part, size_t parts) {
    struct stat st;
    char *target = stx__follow(x, path), *tmp;
    size_t size;
    int fd = -1, exists, done = 0;
    if (!target) return 0;
    size = strlen(target) + 64;
    tmp = (char *)stx_block(x, size);
    exists = tmp ? stx__examine_target(x, path, target, &st) : -1;
    if (exists >= 0) {
        stx__remove_stale(x, target);
        fd = stx__open_tmp(x, target, tmp, size, exists ? 0600 : 0666);
    }
    if (fd >= 0) {
        int code = stx__write_and_rename(fd, tmp, target, exists ? &st : NULL, part, parts);
        if (code) stx__cannot_replace(x, path, code);
        done = !code && stx__sync_dir(x, target);
    }
    stx_block_free(x, tmp);
    stx_block_free(x, target);
    return done;
}

#else

/* Creates a temporary file for path and writes its name to tmp. Never opens an existing
   file, not even through a link. The fopen mode "x" was introduced in C11, and older
   libraries ignore it, so the code first tests whether the file exists. */
static FILE *stx__open_tmp(const char *path, char *tmp, size_t size) {
    size_t stem = stx__stem(path);
    FILE *f = NULL;
    int k;
    memcpy(tmp, path, stem);
    for (k = 0; k < 1000 && !f; k++) {
  #ifdef _WIN32
        int fd;
        snprintf(tmp + stem, size - stem, ".%ld.%d.tmp", (long)_getpid(), k);
        fd = _open(tmp, _O_WRONLY | _O_CREAT | _O_EXCL | _O_BINARY | _O_NOINHERIT,
                   _S_IREAD | _S_IWRITE);
        if (fd < 0 && errno != EEXIST) break;
        if (fd >= 0 && (f = _fdopen(fd, "wb")) == NULL) {
            _close(fd);
            break;
        }
  #else
        snprintf(tmp + stem, size - stem, ".%lx.%d.tmp", (unsigned long)(uintptr_t)tmp, k);
        f = fopen(tmp, "rb");
        if (f) {
            fclose(f);
            f = NULL;
            continue;
        }
        f = fopen(tmp, "wbx");
        if (!f && errno != EEXIST) break;
  #endif
    }
    return f;
}

static int stx__replace(stx_ctx *x, const char *path, const stx__file_part *part, size_t parts) {
    size_t size = strlen(path) + 64, i;
    char *tmp = (char *)stx_block(x, size);
    FILE *f;
    int bad = 0, err;
    if (!tmp) return 0;
    f = stx__open_tmp(path, tmp, size);
    if (!f) {
        stx_fail(x, STX_ERR_IO, "cannot create %s: %s; the directory must exist and be writable",
                 tmp, strerror(errno));
        stx_block_free(x, tmp);
        return 0;
    }
    for (i = 0; i < parts && !bad; i++)
        bad = part[i].bytes && fwrite(part[i].data, 1, part[i].bytes, f) != part[i].bytes;
    if (!bad) bad = fflush(f) != 0;
  #ifdef _WIN32
    if (!bad) bad = _commit(_fileno(f)) != 0;   /* flush before the rename */
  #endif
    err = errno;
    if (fclose(f) != 0 && !bad) {
        bad = 1;
        err = errno;
    }
  #ifdef _WIN32
    if (!bad && !MoveFileExA(tmp, path, 1 | 8)) {   /* replace existing, write through */
        bad = 1;
        err = EACCES;
    }
  #else
    if (!bad && rename(tmp, path) != 0) {
        bad = 1;
        err = errno;
    }
  #endif
    if (bad) {
        remove(tmp);
        stx__cannot_replace(x, path, err);
    }
    stx_block_free(x, tmp);
    return !bad;
}

#endif
