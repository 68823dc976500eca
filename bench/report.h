/* report.h - what the benchmarks share: samples with their quantiles, tables,
   contenders that run in processes of their own */
#ifndef BENCH_REPORT_H
#define BENCH_REPORT_H
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    MAX_SAMPLES = 1024,
    MAX_COLUMNS = 20,
    MAX_ROWS = 256,
    CELL = 96,
    MAX_ARGS = 64,
    MAX_LINE = 32768
};

static inline void die(const char *what) {
    fprintf(stderr, "bench: %s\n", what);
    exit(1);
}

static inline double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline void progress(const char *what) {
    if (isatty(2)) fprintf(stderr, "\r\033[K%s", what);
}


// >>samples

typedef struct {
    double v[MAX_SAMPLES];
    int n;
} samples;

static inline void sample(samples *s, double v) {
    if (s->n < MAX_SAMPLES) s->v[s->n++] = v;
}

static inline int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* 0 least, 0.5 median, 1 greatest; NaN of nothing */
static inline double quantile(const samples *s, double q) {
    double v[MAX_SAMPLES], at = q * (s->n - 1);
    int i = (int)at;
    if (!s->n) return NAN;
    memcpy(v, s->v, (size_t)s->n * sizeof *v);
    qsort(v, (size_t)s->n, sizeof *v, by_value);
    return i + 1 < s->n ? v[i] + (at - i) * (v[i + 1] - v[i]) : v[i];
}

static inline double median(const samples *s) {
    return quantile(s, 0.5);
}


// >>table: collected, then printed as an aligned Markdown table, to the terminal and to
// the file report_path

static const char *report_path;

static struct {
    int columns, rows;
    char cell[MAX_ROWS][MAX_COLUMNS][CELL];
} table;

static inline FILE *report_file(void) {
    static FILE *f;
    if (!f && report_path && !(f = fopen(report_path, "a")))
        die("the file of --append cannot be written");
    return f;
}

static inline void say(const char *fmt, ...) {
    va_list ap;
    FILE *f = report_file();
    progress("");
    va_start(ap, fmt);
    vprintf(fmt, ap);
    va_end(ap);
    fflush(stdout);
    if (!f) return;
    va_start(ap, fmt);
    vfprintf(f, fmt, ap);
    va_end(ap);
    fflush(f);
}

static inline void row_begin(void) {
    if (table.rows == MAX_ROWS) die("more rows than the table has room for");
    memset(table.cell[table.rows++], 0, sizeof table.cell[0]);
}

static inline void cell(int column, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(table.cell[table.rows - 1][column], CELL, fmt, ap);
    va_end(ap);
    if (column + 1 > table.columns) table.columns = column + 1;
}

static inline void header(const char *names) { /* "a|b|c" */
    int c = 0;
    memset(&table, 0, sizeof table);
    row_begin();
    while (*names) {
        size_t n = strcspn(names, "|");
        cell(c++, "%.*s", (int)n, names);
        names += n + (names[n] == '|');
    }
}

static inline void print_table(void) {
    int r, c, width[MAX_COLUMNS] = {0};
    for (r = 0; r < table.rows; r++)
        for (c = 0; c < table.columns; c++) {
            int n = (int)strlen(table.cell[r][c]);
            if (n > width[c]) width[c] = n;
        }
    for (r = 0; r < table.rows; r++) {
        for (c = 0; c < table.columns; c++)
            say(c ? " %*s |" : "| %-*s |", width[c], table.cell[r][c]);
        say("\n");
        if (r) continue;
        for (c = 0; c < table.columns; c++) {
            char dashes[CELL + 2];
            memset(dashes, '-', sizeof dashes);
            dashes[width[c] + 1] = 0;
            say(c ? "%s:|" : "|%s-|", dashes);
        }
        say("\n");
    }
    say("\n");
}


// >>contenders: a line to stdin asks, a JSON line on stdout answers

typedef struct {
    pid_t pid;
    int to, from;
    size_t have; /* bytes in buffer after the line that was answered last */
    char buffer[MAX_LINE], line[MAX_LINE];
} process;

/* Starts a program with pipes to its stdin and from its stdout; stderr goes to a log
   file. */
static inline int spawn(process *c, char *const argv[], const char *log) {
    int down[2], up[2];
    memset(c, 0, sizeof *c);
    if (pipe(down) || pipe(up)) die("no pipe");
    fflush(NULL);
    c->pid = fork();
    if (c->pid < 0) die("no process");
    if (c->pid == 0) {
        FILE *f = freopen(log, "w", stderr);
        (void)f;
        dup2(down[0], 0);
        dup2(up[1], 1);
        close(down[0]);
        close(down[1]);
        close(up[0]);
        close(up[1]);
        execvp(argv[0], argv);
        perror(argv[0]);
        _exit(127);
    }
    close(down[0]);
    close(up[1]);
    /* or the next contender holds this one's stdin open */
    fcntl(down[1], F_SETFD, FD_CLOEXEC);
    fcntl(up[0], F_SETFD, FD_CLOEXEC);
    c->to = down[1];
    c->from = up[0];
    return 1;
}

/* The next line in c->line: 1; 0: it ended; -1: not within limit seconds */
static inline int answer(process *c, double limit) {
    double until = seconds() + limit;
    for (;;) {
        char *end = (char *)memchr(c->buffer, '\n', c->have);
        struct pollfd p;
        double left = until - seconds();
        ssize_t got;
        if (end) {
            size_t n = (size_t)(end - c->buffer);
            memcpy(c->line, c->buffer, n);
            c->line[n] = 0;
            c->have -= n + 1;
            memmove(c->buffer, end + 1, c->have);
            if (c->line[0] == '{') return 1; /* anything else is a library's talk */
            continue;
        }
        if (c->have == sizeof c->buffer) return 0;
        if (left <= 0) return -1;
        p.fd = c->from;
        p.events = POLLIN;
        p.revents = 0;
        if (poll(&p, 1, left > 1 ? 1000 : 1 + (int)(left * 1000)) <= 0) continue;
        got = read(c->from, c->buffer + c->have, sizeof c->buffer - c->have);
        if (got == 0 || (got < 0 && errno != EINTR)) return 0;
        if (got > 0) c->have += (size_t)got;
    }
}

static inline int ask(process *c, const char *what, double limit) {
    size_t n = strlen(what);
    return write(c->to, what, n) == (ssize_t)n && write(c->to, "\n", 1) == 1 ? answer(c, limit) : 0;
}

/* End of input ends a contender; one that does not listen is killed. */
static inline void stop(process *c) {
    static const struct timespec wait = {0, 50000000};
    int i;
    if (c->pid <= 0) return;
    close(c->to);
    for (i = 0; i < 200; i++) {
        if (waitpid(c->pid, NULL, WNOHANG) == c->pid) {
            c->pid = 0;
            break;
        }
        if (i == 100) kill(c->pid, SIGKILL);
        nanosleep(&wait, NULL);
    }
    close(c->from);
    c->pid = 0;
}

static inline const char *json_find(const char *line, const char *key) {
    char want[64];
    const char *p;
    snprintf(want, sizeof want, "\"%s\":", key);
    p = strstr(line, want);
    return p ? p + strlen(want) : NULL;
}

static inline double json_number(const char *line, const char *key) {
    const char *p = json_find(line, key);
    return p ? strtod(p, NULL) : NAN;
}

/* "key": [1, 2] */
static inline void json_numbers(const char *line, const char *key, samples *to) {
    const char *p = json_find(line, key);
    while (p && (*p == ' ' || *p == '[' || *p == ',')) {
        char *end;
        double v;
        p += strspn(p, " [,");
        v = strtod(p, &end);
        if (end == p) break;
        sample(to, v);
        p = end;
    }
}

/* up to the first quote */
static inline void json_text(const char *line, const char *key, char *to, size_t room) {
    const char *p = json_find(line, key);
    if (!p || !(p = strchr(p, '"'))) return;
    snprintf(to, room, "%.*s", (int)strcspn(p + 1, "\""), p + 1);
}

/* The line "cannot: why" of a contender that ended, if it left one; else its last
   line. */
static inline void why_not(const char *log, char *to, size_t room) {
    char line[4096], last[4096] = "";
    int found = 0;
    FILE *f = fopen(log, "r");
    while (f && fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        if (!strncmp(line, "cannot: ", 8)) {
            snprintf(to, room, "%.200s", line + 8);
            found = 1;
        } else if (line[0])
            memcpy(last, line, sizeof last);
    }
    if (f) fclose(f);
    if (!found) snprintf(to, room, "it ended%s%.180s", last[0] ? ": " : " without a word", last);
}
#endif
