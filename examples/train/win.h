/* win.h - implements, for Windows with MinGW (gcc or clang), the POSIX functions that
   train.h uses: files, console, Ctrl-C, clocks, memory

   Only train.h includes this file. Macros map POSIX names to the functions in this file,
   so that train.h is the same on all systems.

   Differences from POSIX
       Files and standard streams are binary: a line ends with \n alone. Paths are
       encoded in the system's code page, with / between directories. There are no
       symbolic links and no file modes. Ctrl-C is SIGINT and Ctrl-Break is SIGTERM.
       Closing the console, logging out and shutting down are SIGHUP; after that, the
       system ends the process within five seconds. */
#ifndef SEQTX_EXAMPLES_WIN_H
#define SEQTX_EXAMPLES_WIN_H

#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#ifndef NOMINMAX
#define NOMINMAX
#endif
#ifndef NOGDI
#define NOGDI                   /* omit wingdi.h: it defines names such as PATTERN */
#endif
#include <windows.h>
#include <direct.h>
#include <io.h>
#include <process.h>
#include <sys/types.h>

#define TR_WIN static __attribute__((unused))


// >>start of a program

static __attribute__((constructor)) void tr_win_start(void) {
    HANDLE console = GetStdHandle(STD_ERROR_HANDLE);
    DWORD mode;
    int i;
    _fmode = _O_BINARY;
    for (i = 0; i < 3; i++) (void)_setmode(i, _O_BINARY);
    /* 4 is ENABLE_VIRTUAL_TERMINAL_PROCESSING: escape sequences (since Windows 10) */
    if (GetConsoleMode(console, &mode)) (void)SetConsoleMode(console, mode | 4);
}


// >>files

#ifndef O_CLOEXEC
#define O_CLOEXEC _O_NOINHERIT
#endif
#define O_NOFOLLOW        0
#define O_NONBLOCK        0
#define S_ISLNK(mode)     ((void)(mode), 0)
#undef X_OK
#define X_OK              0         /* used only for directories, which are always searchable */
#define fsync             _commit
#define mkdir(path, mode) _mkdir(path)
#define fchmod(fd, mode)  ((void)(fd), (void)(mode), 0)

struct tr_win_stat {
    unsigned st_mode;
    int64_t  st_size;
    uint64_t st_dev, st_ino, st_nlink;
};

/* Sets *st to the status of an open file. Returns 0, or -1 with errno set. All names of
   a file have the same st_ino, which this C library's stat does not provide. */
TR_WIN int tr_win_look(HANDLE file, struct tr_win_stat *st) {
    BY_HANDLE_FILE_INFORMATION f;
    DWORD kind = GetFileType(file);
    memset(st, 0, sizeof *st);
    if (kind == FILE_TYPE_DISK && GetFileInformationByHandle(file, &f)) {
        st->st_mode = f.dwFileAttributes & FILE_ATTRIBUTE_DIRECTORY ? S_IFDIR : S_IFREG;
        st->st_mode |= f.dwFileAttributes & FILE_ATTRIBUTE_READONLY ? 0444 : 0666;
        st->st_size = (int64_t)((uint64_t)f.nFileSizeHigh << 32 | f.nFileSizeLow);
        st->st_nlink = f.nNumberOfLinks;
        st->st_dev = f.dwVolumeSerialNumber;
        st->st_ino = (uint64_t)f.nFileIndexHigh << 32 | f.nFileIndexLow;
        return 0;
    }
    st->st_mode = kind == FILE_TYPE_PIPE ? S_IFIFO : S_IFCHR;
    if (kind == FILE_TYPE_PIPE || kind == FILE_TYPE_CHAR) return 0;
    errno = EIO;
    return -1;
}

TR_WIN int tr_win_stat(const char *path, struct tr_win_stat *st) {
    /* Access 0 permits only querying attributes. FILE_FLAG_BACKUP_SEMANTICS permits
       opening directories. */
    HANDLE file = CreateFileA(path, 0, FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE,
                              NULL, OPEN_EXISTING, FILE_FLAG_BACKUP_SEMANTICS, NULL);
    int result;
    if (file == INVALID_HANDLE_VALUE) {
        DWORD why = GetLastError();
        errno = why == ERROR_ACCESS_DENIED || why == ERROR_SHARING_VIOLATION ? EACCES : ENOENT;
        return -1;
    }
    result = tr_win_look(file, st);
    CloseHandle(file);
    return result;
}

TR_WIN int tr_win_fstat(int fd, struct tr_win_stat *st) {
    return tr_win_look((HANDLE)_get_osfhandle(fd), st);
}

/* With a 64-bit off_t, these are already macros. */
#undef stat
#undef fstat
#define stat  tr_win_stat
#define lstat tr_win_stat
#define fstat tr_win_fstat

/* Like tr_lock in train.h. Locks a byte far beyond the end of the file, because other
   processes cannot read locked bytes. */
TR_WIN int tr_win_lock(int fd) {
    const DWORD how = LOCKFILE_EXCLUSIVE_LOCK | LOCKFILE_FAIL_IMMEDIATELY;
    OVERLAPPED at;
    memset(&at, 0, sizeof at);
    at.OffsetHigh = 0x40000000;
    if (LockFileEx((HANDLE)_get_osfhandle(fd), how, 0, 1, 0, &at)) return 1;
    return GetLastError() == ERROR_LOCK_VIOLATION || GetLastError() == ERROR_IO_PENDING ? 0 : -1;
}

/* Always fails, because there are no links. Sets errno to EINVAL for an existing file,
   as readlink does if it is not a link. */
TR_WIN ssize_t tr_win_readlink(const char *path, char *to, size_t capacity) {
    struct tr_win_stat st;
    (void)to;
    (void)capacity;
    if (tr_win_stat(path, &st) == 0) errno = EINVAL;
    return -1;
}

#define readlink tr_win_readlink

/* The C library's rename does not replace existing files. */
TR_WIN int tr_win_rename(const char *from, const char *to) {
    if (MoveFileExA(from, to, MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH)) return 0;
    errno = EACCES;
    return -1;
}

#define rename tr_win_rename

TR_WIN int tr_win_truncate(int fd, int64_t size) {
    return _chsize_s(fd, size) ? -1 : 0;
}

#define ftruncate tr_win_truncate

TR_WIN ssize_t tr_win_getline(char **line, size_t *capacity, FILE *in) {
    size_t n = 0;
    int c;
    while ((c = getc(in)) != EOF) {
        if (n + 2 > *capacity) {
            size_t more = *capacity < 64 ? 128 : 2 * *capacity;
            char *grown = (char *)realloc(*line, more);
            if (grown == NULL) {
                errno = ENOMEM;
                return -1;
            }
            *line = grown;
            *capacity = more;
        }
        (*line)[n++] = (char)c;
        if (c == '\n') break;
    }
    if (n == 0 || (c == EOF && ferror(in))) return -1;
    (*line)[n] = 0;
    return (ssize_t)n;
}

#define getline tr_win_getline


// >>console

#define TIOCGWINSZ 1

struct winsize {
    size_t ws_col;
};

TR_WIN int tr_win_size(int fd, int what, struct winsize *w) {
    CONSOLE_SCREEN_BUFFER_INFO info;
    (void)what;
    if (!GetConsoleScreenBufferInfo((HANDLE)_get_osfhandle(fd), &info)) return -1;
    w->ws_col = (size_t)(info.srWindow.Right - info.srWindow.Left + 1);
    return 0;
}

#define ioctl tr_win_size

/* The C library's isatty also returns nonzero for NUL. */
TR_WIN int tr_win_isatty(int fd) {
    DWORD mode;
    return GetConsoleMode((HANDLE)_get_osfhandle(fd), &mode) != 0;
}

#define isatty tr_win_isatty


// >>signals

#ifndef SIGHUP
#define SIGHUP 1
#endif

struct tr_win_sigaction {
    void (*sa_handler)(int);
    int    sa_mask;
};

static void (*tr_win_handler)(int) TR_UNUSED;

/* Runs on a separate system thread, concurrently with the program. */
TR_WIN BOOL WINAPI tr_win_event(DWORD event) {
    int sig = SIGHUP;
    if (event == CTRL_C_EVENT) sig = SIGINT;
    if (event == CTRL_BREAK_EVENT) sig = SIGTERM;
    if (tr_win_handler == NULL) return FALSE;
    tr_win_handler(sig);
    if (sig == SIGHUP) Sleep(INFINITE);     /* returning would end the process immediately */
    return TRUE;
}

TR_WIN int tr_win_sigaction(int sig, const struct tr_win_sigaction *now,
                            struct tr_win_sigaction *was) {
    (void)sig;
    if (was != NULL) was->sa_handler = NULL;
    if (now == NULL) return 0;
    if (tr_win_handler == NULL && !SetConsoleCtrlHandler(tr_win_event, TRUE)) {
        errno = EINVAL;
        return -1;
    }
    tr_win_handler = now->sa_handler;
    return 0;
}

#define sigaction           tr_win_sigaction
#define sigemptyset(set)    ((void)(*(set) = 0))
#define sigaddset(set, sig) ((void)(set), (void)(sig))


// >>clocks and memory

#define CLOCK_REALTIME  0
#define CLOCK_MONOTONIC 1

TR_WIN int tr_win_clock(int which, struct timespec *t) {
    LARGE_INTEGER count, per_second;
    FILETIME now;
    uint64_t ticks;     /* in units of 100 ns; FILETIME counts from 1601 */
    if (which == CLOCK_REALTIME) {
        GetSystemTimeAsFileTime(&now);
        ticks = ((uint64_t)now.dwHighDateTime << 32 | now.dwLowDateTime) - 116444736000000000u;
    } else {
        QueryPerformanceCounter(&count);
        QueryPerformanceFrequency(&per_second);
        ticks = (uint64_t)(count.QuadPart / per_second.QuadPart) * 10000000u
                + (uint64_t)(count.QuadPart % per_second.QuadPart) * 10000000u
                      / (uint64_t)per_second.QuadPart;
    }
    t->tv_sec = (time_t)(ticks / 10000000u);
    t->tv_nsec = (long)(ticks % 10000000u * 100u);
    return 0;
}

#define clock_gettime tr_win_clock

#define _SC_PHYS_PAGES 0
#define _SC_PAGESIZE   1

TR_WIN int64_t tr_win_sysconf(int what) {
    MEMORYSTATUSEX m;
    m.dwLength = sizeof m;
    if (what == _SC_PAGESIZE) return 4096;
    return GlobalMemoryStatusEx(&m) ? (int64_t)(m.ullTotalPhys / 4096) : -1;
}

#define sysconf tr_win_sysconf

TR_WIN int tr_win_hostname(char *name, size_t size) {
    DWORD n = (DWORD)size;
    return GetComputerNameA(name, &n) ? 0 : -1;
}

#define gethostname tr_win_hostname

#endif /* SEQTX_EXAMPLES_WIN_H */
