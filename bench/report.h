/* report.h - shared by all benchmarks: options, samples and their quantiles, tables,
   and contenders that run in separate processes. */
#ifndef BENCH_REPORT_H
#define BENCH_REPORT_H
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
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

static const char *program = "bench"; /* the program's name in messages; set by main() */

static inline void die(const char *what) {
    fprintf(stderr, "%s: %s\n", program, what);
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


// >>options of a command line

/* An option. Its value is stored in *whole, *real or *text, and the other two of these
   pointers are NULL. *whole receives a number of at least `least`, the index of the
   value in `choices`, or 1 for a flag, which has no value. A table of options ends with
   OPTION_END. */
typedef struct {
    const char *name;
    int *whole, least;
    double *real;
    const char **text, *choices;
} option;

enum { IS_FLAG = -1 };

#define OPTION_FLAG(name, to)            {name, to, IS_FLAG, NULL, NULL, NULL}
#define OPTION_WHOLE(name, to, least)    {name, to, least, NULL, NULL, NULL}
#define OPTION_CHOICE(name, to, choices) {name, to, 0, NULL, NULL, choices}
#define OPTION_REAL(name, to)            {name, NULL, 0, to, NULL, NULL}
#define OPTION_TEXT(name, to)            {name, NULL, 0, NULL, to, NULL}
#define OPTION_END                       {NULL, NULL, 0, NULL, NULL, NULL}

/* Returns the rest of a comma-separated list after its first element. */
static inline const char *after(const char *list) {
    list += strcspn(list, ",");
    return list + (*list == ',');
}

/* Returns the index of a name in a list such as "f32,bf16", or -1. */
static inline int position(const char *list, const char *name) {
    size_t n = strlen(name);
    int i = 0;
    for (; *list; list = after(list), i++)
        if (strcspn(list, ",") == n && !strncmp(list, name, n)) return i;
    return -1;
}

/* Returns nonzero if the list contains the name. A NULL list contains every name. */
static inline int listed(const char *list, const char *name) {
    return !list || position(list, name) >= 0;
}

/* Ends the program with an error message if an element of `given` is not in `known`. */
static inline void require_listed(const char *name, const char *given, const char *known) {
    char element[64];
    for (; given && *given; given = after(given)) {
        snprintf(element, sizeof element, "%.*s", (int)strcspn(given, ","), given);
        if (listed(known, element)) continue;
        fprintf(stderr, "%s: %s: expected names from %s, got %s\n", program, name, known, element);
        exit(2);
    }
}

static inline int option_whole(const option *o, const char *value) {
    char *end;
    long v = strtol(value, &end, 10);
    if (o->choices) {
        v = position(o->choices, value);
        if (v >= 0) return (int)v;
        fprintf(stderr, "%s: %s: expected one of %s, got %s\n", program, o->name, o->choices,
                value);
        exit(2);
    }
    if (end == value || *end || v < o->least || v > 1000000000) {
        fprintf(stderr, "%s: %s: expected a whole number of at least %d, got %s\n", program,
                o->name, o->least, value);
        exit(2);
    }
    return (int)v;
}

/* Parses the option argv[i] if the table contains it. Returns the number of arguments
   used, or 0 if the option is unknown or its value is missing. */
static inline int option_take(const option *o, int argc, char **argv, int i) {
    while (o->name && strcmp(o->name, argv[i])) o++;
    if (!o->name) return 0;
    if (o->whole && o->least == IS_FLAG) {
        *o->whole = 1;
        return 1;
    }
    if (i + 1 == argc) return 0;
    if (o->whole)
        *o->whole = option_whole(o, argv[i + 1]);
    else if (o->real)
        *o->real = strtod(argv[i + 1], NULL);
    else
        *o->text = argv[i + 1];
    return 2;
}

/* Reports an option that is unknown or has no value, and returns the exit code. */
static inline int option_unknown(const char *what, const char *usage) {
    fprintf(stderr, "%s: unknown option or missing value: %s\n%s", program, what, usage);
    return 2;
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

/* Returns a quantile: the minimum for q = 0, the median for 0.5, the maximum for 1.
   Returns NaN if there are no samples. */
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

/* Marks n results as not measured by setting them to NaN. */
static inline void not_measured(double *v, size_t n) {
    while (n-- > 0) v[n] = NAN;
}

static inline int measured(double v) {
    return v == v;
}


// >>table: collected, then printed as an aligned Markdown table to the terminal and to
// the file report_path

static const char *report_path;

static struct {
    int columns, rows;
    char cell[MAX_ROWS][MAX_COLUMNS][CELL];
} table;

static inline FILE *report_file(void) {
    static FILE *f;
    if (!f && report_path && !(f = fopen(report_path, "a")))
        die("cannot write the --append file");
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
    if (table.rows == MAX_ROWS) die("too many rows for the table");
    memset(table.cell[table.rows++], 0, sizeof table.cell[0]);
}

static inline void cell(int column, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(table.cell[table.rows - 1][column], CELL, fmt, ap);
    va_end(ap);
    if (column + 1 > table.columns) table.columns = column + 1;
}

/* Writes the median of samples, multiplied by scale. */
static inline void cell_median(int column, const samples *s, int digits, double scale) {
    cell(column, "%.*f", digits, median(s) * scale);
}

static inline void cell_range(int column, const samples *s, int digits, double scale) {
    cell(column, "%.*f - %.*f", digits, quantile(s, 0) * scale, digits, quantile(s, 1) * scale);
}

/* Writes the median and the range in two columns, and returns the next column. */
static inline int cell_spread(int column, const samples *s, int digits, double scale) {
    cell_median(column, s, digits, scale);
    cell_range(column + 1, s, digits, scale);
    return column + 2;
}

/* Writes n values to consecutive columns, and "-" for those that were not measured. */
static inline void cell_values(int column, const double *v, const int *digits, int n) {
    int i;
    for (i = 0; i < n; i++) {
        if (measured(v[i]))
            cell(column + i, "%.*f", digits[i], v[i]);
        else
            cell(column + i, "-");
    }
}

static inline void header(const char *names) { /* names: "a|b|c" */
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


// >>contenders: separate processes. A line on stdin is a request; the reply is a line
// of JSON on stdout.

/* A command line under construction. v ends with NULL; `number` stores the text of
   numeric arguments. */
typedef struct {
    char *v[MAX_ARGS + 1], number[MAX_ARGS][24];
    int n;
} arguments;

static inline void arg(arguments *a, const char *text) {
    if (a->n == MAX_ARGS) die("too many arguments for a contender");
    a->v[a->n++] = (char *)(uintptr_t)text;
    a->v[a->n] = NULL;
}

static inline void arg_text(arguments *a, const char *name, const char *value) {
    arg(a, name);
    arg(a, value);
}

static inline void arg_number(arguments *a, const char *name, size_t value) {
    arg(a, name);
    snprintf(a->number[a->n % MAX_ARGS], sizeof a->number[0], "%zu", value);
    arg(a, a->number[a->n % MAX_ARGS]);
}

typedef struct {
    pid_t pid;
    int to, from;
    size_t have; /* bytes in the buffer after the last line that was read */
    char buffer[MAX_LINE], line[MAX_LINE];
} process;

/* Starts a program with pipes to its stdin and from its stdout. Its stderr goes to a
   log file. */
static inline int spawn(process *c, char *const argv[], const char *log) {
    int down[2], up[2];
    memset(c, 0, sizeof *c);
    if (pipe(down) || pipe(up)) die("cannot create a pipe");
    fflush(NULL);
    c->pid = fork();
    if (c->pid < 0) die("cannot create a process");
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
    /* otherwise, the next contender would inherit the pipes and keep this one's stdin
       open */
    fcntl(down[1], F_SETFD, FD_CLOEXEC);
    fcntl(up[0], F_SETFD, FD_CLOEXEC);
    c->to = down[1];
    c->from = up[0];
    return 1;
}

/* Reads the next reply, a line that starts with {, into c->line. Returns 1 if there is
   one, 0 if the process has ended, and -1 if no reply arrived within `limit`
   seconds. */
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
            if (c->line[0] == '{') return 1; /* other lines are messages of libraries */
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
    if (write(c->to, what, n) != (ssize_t)n || write(c->to, "\n", 1) != 1) return 0;
    return answer(c, limit);
}

/* Ends a contender by closing its input, or kills it if that has no effect. */
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
    char quoted[64];
    const char *p;
    snprintf(quoted, sizeof quoted, "\"%s\":", key);
    p = strstr(line, quoted);
    return p ? p + strlen(quoted) : NULL;
}

static inline double json_number(const char *line, const char *key) {
    const char *p = json_find(line, key);
    return p ? strtod(p, NULL) : NAN;
}

/* Adds the numbers of an array such as "key": [1, 2] to `to`. */
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

/* Reads a string value up to its closing quote. */
static inline void json_text(const char *line, const char *key, char *to, size_t size) {
    const char *p = json_find(line, key);
    if (!p || !(p = strchr(p, '"'))) return;
    snprintf(to, size, "%.*s", (int)strcspn(p + 1, "\""), p + 1);
}

/* Reads the reason why a contender ended from its log: the line "cannot: REASON" or,
   without such a line, the last line. */
static inline void why_not(const char *log, char *to, size_t size) {
    char line[4096], last[4096] = "";
    int found = 0;
    FILE *f = fopen(log, "r");
    while (f && fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        if (!strncmp(line, "cannot: ", 8)) {
            snprintf(to, size, "%.200s", line + 8);
            found = 1;
        } else if (line[0])
            memcpy(last, line, sizeof last);
    }
    if (f) fclose(f);
    if (!found) snprintf(to, size, "it ended%s%.180s", last[0] ? ": " : " without a message", last);
}
#endif
