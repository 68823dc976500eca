#pragma once
#include "base.h"
#include "buffer.h"
#include "json.h"
#include "options_values.h"
#include "files.h"


// >>log: one JSON object per line

/* Usage:

       tr_log_begin(&log, "train");
       tr_log_int(&log, "step", 7);
       tr_log_num(&log, "loss", 1.5);
       tr_log_end(&log);

   writes {"event":"train","step":7,"loss":1.5}. If the log was opened without a path,
   the calls do nothing. */

#define TR_KEEP_ALL UINT64_MAX

typedef struct {
    tr_appender out;
    tr_buf      line;
    char        err[TR_ERR];    /* set when tr_log_end returns 0 */
} tr_log;

/* Nonzero if this line must be removed when a run resumes after `step`: its "step" is
   later, or the line is incomplete because the process was killed. Other lines are
   kept, even if they are not JSON objects. */
TR_DEF int tr_log_is_stale(const char *line, size_t n, uint64_t step) {
    char text[32];
    uint64_t at;
    if (n == 0 || line[n - 1] != '\n') return 1;
    if (strlen(line) != n || tr_json_find(line, "step", text, sizeof text) != 1) return 0;
    return tr_read_size(text, &at) && at > step;
}

TR_DEF int tr_log_unreadable(const char *path, char *err, size_t size) {
    return tr_fail(err, size, "%s: cannot read the existing log: %s", path, strerror(errno));
}

/* Rewrites the log without the lines that tr_log_is_stale selects. If there are none,
   the file is not changed. */
TR_DEF int tr_log_trim(const char *path, uint64_t step, char *err, size_t size) {
    struct stat st;
    FILE *in;
    char *line = NULL;
    size_t capacity = 0, dropped = 0;
    ssize_t n;
    tr_buf keep;
    int ok = 0;
    memset(&keep, 0, sizeof keep);
    if (stat(path, &st) != 0) return errno == ENOENT ? 1 : tr_log_unreadable(path, err, size);
    if (!S_ISREG(st.st_mode)) return 1;         /* a pipe or a device has no old lines */
    in = fopen(path, "rb");
    if (in == NULL) return tr_log_unreadable(path, err, size);

    while ((n = getline(&line, &capacity, in)) >= 0) {
        if (tr_log_is_stale(line, (size_t)n, step)) dropped++;
        else tr_buf_put(&keep, line, (size_t)n);
    }
    if (!feof(in)) tr_log_unreadable(path, err, size);      /* a read error, or out of memory */
    else if (keep.oom) tr_fail(err, size, "%s: out of memory: cannot read the existing log", path);
    else ok = 1;
    fclose(in);

    if (ok && dropped > 0) ok = tr_replace(path, keep.s != NULL ? keep.s : "", keep.n, err, size);
    free(line);
    tr_buf_free(&keep);
    return ok;
}

/* Returns 1 if the file is a log, empty or absent. Otherwise, sets err and returns 0. */
TR_DEF int tr_log_here(const char *path, char *err, size_t size) {
    static const char begin[] = "{\"event\":\"";
    char first[sizeof begin - 1];
    struct stat st;
    if (stat(path, &st) != 0 || !S_ISREG(st.st_mode)) return 1;
    /* a short file may be the start of a log */
    if (memcmp(first, begin, tr_first_bytes(path, first, sizeof first)) == 0) return 1;
    return tr_fail(err, size, "--log %s: expected a new file or the log of a run, got a file that "
                   "is not a log: choose another name", path);
}

/* Opens a log for appending. If path is NULL, nothing is logged. resume_step is the
   step after which the run resumes: lines of later steps are removed, because they will
   be written again. TR_KEEP_ALL keeps every complete line. */
TR_DEF int tr_log_open(tr_log *l, const char *path, uint64_t resume_step, char *err, size_t size) {
    memset(l, 0, sizeof *l);
    l->out.fd = -1;
    if (path == NULL) return 1;
    if (!tr_log_trim(path, resume_step, err, size)) return 0;
    return tr_append_open(&l->out, path, 0, err, size);
}

TR_DEF void tr_log_key(tr_log *l, const char *key) {
    tr_buf_puts(&l->line, l->line.n == 0 ? "{" : ",");
    tr_json_string(&l->line, key);
    tr_buf_puts(&l->line, ":");
}

TR_DEF void tr_log_str(tr_log *l, const char *key, const char *text) {
    if (l->out.fd < 0) return;
    tr_log_key(l, key);
    tr_json_string(&l->line, text);
}

TR_DEF void tr_log_num(tr_log *l, const char *key, double x) {
    char text[32];
    if (l->out.fd < 0) return;
    tr_log_key(l, key);
    tr_number(text, x);
    tr_buf_puts(&l->line, text);
}

TR_DEF void tr_log_int(tr_log *l, const char *key, uint64_t x) {
    if (l->out.fd < 0) return;
    tr_log_key(l, key);
    tr_buf_printf(&l->line, "%" PRIu64, x);
}

/* Adds a value that is already JSON, such as the result of tr_options_json. */
TR_DEF void tr_log_json(tr_log *l, const char *key, const char *json) {
    if (l->out.fd < 0) return;
    tr_log_key(l, key);
    tr_buf_puts(&l->line, json != NULL ? json : "null");
}

/* Begins a list of numbers. tr_log_item adds each number, and tr_log_list_end ends the
   list. */
TR_DEF void tr_log_list(tr_log *l, const char *key) {
    if (l->out.fd < 0) return;
    tr_log_key(l, key);
    tr_buf_puts(&l->line, "[");
}

TR_DEF void tr_log_item(tr_log *l, const char *number) {
    if (l->out.fd < 0) return;
    if (l->line.n > 0 && l->line.s[l->line.n - 1] != '[') tr_buf_puts(&l->line, ",");
    tr_buf_puts(&l->line, number);
}

TR_DEF void tr_log_list_end(tr_log *l) {
    if (l->out.fd >= 0) tr_buf_puts(&l->line, "]");
}

TR_DEF void tr_log_begin(tr_log *l, const char *event) {
    l->line.n = 0;
    l->line.oom = 0;
    tr_log_str(l, "event", event);
}

/* Writes the line in one call. Returns 0 once, when writing fails for the first time;
   l->err then says why. */
TR_DEF int tr_log_end(tr_log *l) {
    if (l->out.fd < 0) return 1;
    tr_buf_puts(&l->line, "}\n");
    if (l->line.oom)
        return tr_fail(l->err, sizeof l->err, "%s: out of memory: cannot write a record",
                       l->out.path);
    return tr_append(&l->out, l->line.s, l->line.n, l->err, sizeof l->err);
}

TR_DEF int tr_log_close(tr_log *l) {
    tr_buf_free(&l->line);
    return tr_append_close(&l->out, l->err, sizeof l->err);
}
