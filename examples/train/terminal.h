#pragma once
#include "base.h"
#include "buffer.h"
#include "json.h"
#include "options_help.h"
#include "files.h"
#include "formats.h"


// >>clock

/* Returns the time of a monotonic clock in seconds. Only differences are meaningful. With
   TR_PROCESSOR_TIME it is the processor time of all threads, so that --minutes gives the
   same run on a busy machine (bench/learn.sh). */
TR_DEF double tr_seconds(void) {
    struct timespec t;
#ifdef TR_PROCESSOR_TIME
    if (clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t) != 0) return 0;
#else
    if (clock_gettime(CLOCK_MONOTONIC, &t) != 0) return 0;
#endif
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}


// >>terminal: one line that is redrawn; plain lines in pipes and files

/* Smoothed training speed. Time, steps and tokens decay with the same weight, so that
   their ratios are correct from the first step on and adapt to a new pace within about
   TR_RATE_MEMORY seconds. */
#define TR_RATE_MEMORY 20.0

typedef struct {
    double last, seconds, steps, tokens;
} tr_rate;

TR_DEF void tr_rate_start(tr_rate *r, double now) {
    memset(r, 0, sizeof *r);
    r->last = now;
}

/* Excludes the time since the last call of tr_rate_add or tr_rate_skip from the rate,
   for example the time of an evaluation or a save. */
TR_DEF void tr_rate_skip(tr_rate *r, double now) {
    r->last = now;
}

TR_DEF void tr_rate_add(tr_rate *r, double now, double steps, double tokens) {
    double dt = now - r->last, fade;
    if (!(dt >= 0)) dt = 0;
    fade = TR_RATE_MEMORY / (TR_RATE_MEMORY + dt);
    r->seconds = r->seconds * fade + dt;
    r->steps = r->steps * fade + steps;
    r->tokens = r->tokens * fade + tokens;
    r->last = now;
}

TR_DEF double tr_rate_tokens(const tr_rate *r) {
    return r->seconds > 0 ? r->tokens / r->seconds : 0;
}

/* Returns the estimated time that `steps` more steps will take, in seconds, or -1 if it
   is not yet known. */
TR_DEF double tr_rate_left(const tr_rate *r, uint64_t steps) {
    return r->seconds > 0 && r->steps > 0 ? (double)steps * r->seconds / r->steps : -1;
}

typedef struct {
    uint64_t    step, steps;    /* steps is 0 if the end is not known */
    double      loss;
    double      metric;         /* the step's loss, converted to `unit` */
    const char *unit;           /* "bpb" or "ppl"; NULL to omit the metric */
    double      best;           /* best validation result in `unit`; 0 or NaN: none */
    double      lr;
    double      tokens_per_s;
    double      left;           /* in seconds; negative to omit it */
} tr_progress;

/* Writes a line for a pipe or a file:

       step 1200/5000  loss 1.234  1.780 bpb  lr 7.0e-02  12.3k tok/s  left 3m12s */
TR_DEF void tr_progress_line(char *out, size_t size, const tr_progress *p) {
    char loss[TR_TEXT_MAX], speed[TR_TEXT_MAX], text[TR_TEXT_MAX], total[TR_TEXT_MAX] = "";
    char metric[64] = "", left[64] = "";
    if (p->steps > 0) snprintf(total, sizeof total, "/%" PRIu64, p->steps);
    if (p->unit != NULL)
        snprintf(metric, sizeof metric, "  %s %.16s", tr_fixed(text, p->metric, 3), p->unit);
    if (p->left >= 0) snprintf(left, sizeof left, "  left %s", tr_duration(text, p->left));
    snprintf(out, size, "step %" PRIu64 "%s  loss %s%s  lr %.1e  %s tok/s%s", p->step, total,
             tr_fixed(loss, p->loss, 3), metric, p->lr, tr_count(speed, p->tokens_per_s), left);
}

/* Parts of the line for a terminal, from left to right. An empty part is not shown. */
enum {
    TR_PART_STEP, TR_PART_BAR, TR_PART_DONE, TR_PART_LOSS, TR_PART_BEST, TR_PART_SPEED,
    TR_PART_LEFT, TR_PART_RATE, TR_PARTS
};

typedef char tr_part[96];

/* Writes the text of all parts. The bar is empty and has the minimum size of 5 cells. */
TR_DEF void tr_progress_parts(const tr_progress *p, double share, tr_part part[TR_PARTS]) {
    const size_t size = sizeof part[0];
    char text[TR_TEXT_MAX], total[TR_TEXT_MAX] = "";
    memset(part, 0, TR_PARTS * size);
    if (p->steps > 0) {
        snprintf(total, sizeof total, "/%" PRIu64, p->steps);
        snprintf(part[TR_PART_DONE], size, "%d%%", (int)(100 * share));
        strcpy(part[TR_PART_BAR], "[=====]");
    }
    snprintf(part[TR_PART_STEP], size, "step %" PRIu64 "%s", p->step, total);
    if (p->unit != NULL)
        snprintf(part[TR_PART_LOSS], size, "%s %.16s", tr_fixed(text, p->metric, 3), p->unit);
    else
        snprintf(part[TR_PART_LOSS], size, "loss %s", tr_fixed(text, p->loss, 3));
    if (p->best > 0) snprintf(part[TR_PART_BEST], size, "best %s", tr_fixed(text, p->best, 3));
    snprintf(part[TR_PART_SPEED], size, "%s tok/s", tr_count(text, p->tokens_per_s));
    if (p->left >= 0) snprintf(part[TR_PART_LEFT], size, "left %s", tr_duration(text, p->left));
    snprintf(part[TR_PART_RATE], size, "lr %.1e", p->lr);
}

/* Returns the total number of columns of all parts, with two blanks between parts. */
TR_DEF size_t tr_progress_width(tr_part part[TR_PARTS]) {
    size_t need = 0, i;
    for (i = 0; i < TR_PARTS; i++)
        if (part[i][0]) need += strlen(part[i]) + (need > 0 ? 2 : 0);
    return need;
}

/* Draws a bar of the given number of cells. */
TR_DEF void tr_progress_bar(tr_part bar, double share, size_t cells) {
    size_t full = (size_t)(share * (double)cells), i;
    bar[0] = '[';
    for (i = 0; i < cells; i++) bar[1 + i] = i < full ? '=' : ' ';
    if (full < cells) bar[1 + full] = '>';
    strcpy(bar + 1 + cells, "]");
}

/* Writes the line for a terminal of `width` columns:

       step 1200/5000  [==>       ]  24%  1.780 bpb  best 1.812  12.3k tok/s  left 3m12s

   The bar fills the remaining columns, up to 30 cells. It has at least 5 cells, and at
   least 15 if the learning rate is shown too. In a narrow terminal, parts are omitted
   in the order of `first` below. The loss and the percentage are always shown. */
TR_DEF void tr_progress_live(char *out, size_t size, const tr_progress *p, size_t width) {
    static const int first[] = {
        TR_PART_RATE, TR_PART_STEP, TR_PART_BAR, TR_PART_SPEED, TR_PART_BEST, TR_PART_LEFT
    };
    const size_t omitted = sizeof first / sizeof *first;
    tr_part part[TR_PARTS];
    size_t need, i, k, cells, at = 0;
    double share = p->steps > 0 ? (double)p->step / (double)p->steps : 0;
    if (share > 1) share = 1;
    tr_progress_parts(p, share, part);
    for (k = 0;; k++) {
        size_t more = k < 1 && part[TR_PART_BAR][0] ? 10 : 0;
        need = tr_progress_width(part);
        if (need + more <= width || k == omitted) break;
        part[first[k]][0] = 0;
    }
    if (part[TR_PART_BAR][0]) {
        cells = width - need + 5;
        tr_progress_bar(part[TR_PART_BAR], share, cells < 30 ? cells : 30);
    }

    out[0] = 0;
    for (i = 0; i < TR_PARTS && at < size; i++)
        if (part[i][0])
            at += (size_t)snprintf(out + at, size - at, "%s%s", at > 0 ? "  " : "", part[i]);
    if (width < size) out[width] = 0;
}

/* Replaces blanks with newlines so that a terminal of `width` columns does not split
   words. Does nothing if width is 0 (not a terminal). */
TR_DEF void tr_fold(char *text, size_t width) {
    size_t column = 0;
    char *s, *blank = NULL, *after;
    for (s = text; width > 0 && *s; s++) {
        if (*s == '\n') {
            column = 0;
            blank = NULL;
            continue;
        }
        if (((unsigned char)*s & 0xC0) == 0x80) continue;       /* continuation byte */
        if (*s == ' ') blank = s;
        if (++column < width || blank == NULL || *s == ' ') continue;
        *blank = '\n';
        for (column = 0, after = blank + 1; after <= s; after++)
            column += ((unsigned char)*after & 0xC0) != 0x80;
        blank = NULL;
    }
}

typedef struct {
    FILE  *f;
    int    tty;
    int    shown;           /* 1: a progress line is on the screen, with the cursor after it */
    int    failed;          /* 1: a write failed, which was reported on standard error */
    double drawn;           /* time of the last drawing, in seconds */
    char   line[512];
} tr_term;

/* Prepares to show progress on f. If f is NULL, nothing is shown. */
TR_DEF void tr_term_open(tr_term *t, FILE *f) {
    const char *kind = getenv("TERM");
    memset(t, 0, sizeof *t);
    t->f = f;
    t->tty = f != NULL && isatty(fileno(f)) && !(kind != NULL && strcmp(kind, "dumb") == 0);
    t->drawn = -1;
}

TR_DEF void tr_term_write(tr_term *t, const char *text, size_t n) {
    if (t->failed || t->f == NULL) return;
    if (fflush(t->f) == 0 && tr_write_all(fileno(t->f), text, n)) return;
    t->failed = 1;
    fprintf(stderr, "cannot write progress: %s; continuing without it\n", strerror(errno));
}

/* Redraws the line, cut to the width of the terminal, because a wrapped line cannot be
   overwritten. */
TR_DEF void tr_term_draw(tr_term *t) {
    char text[sizeof t->line + 16];
    size_t width = tr_columns(fileno(t->f)), n = strlen(t->line);
    if (width == 0) width = 80;
    if (n > width - 1) n = width - 1;
    n = (size_t)snprintf(text, sizeof text, "\r%.*s\033[K", (int)n, t->line);
    tr_term_write(t, text, n);
    t->shown = 1;
}

/* Shows the progress. On a terminal, the line is redrawn at most ten times per second.
   Elsewhere, a line is written whenever `due` is set (at the log interval). */
TR_DEF void tr_show(tr_term *t, const tr_progress *p, int due) {
    double now = tr_seconds();
    if (!t->tty && !due) return;
    if (t->tty && !due && t->drawn >= 0 && now - t->drawn < 0.1) return;
    t->drawn = now;
    if (t->tty) {
        size_t width = tr_columns(fileno(t->f));
        /* Some terminals wrap after the last column, and Ctrl-C is shown as ^C. */
        width = width > 3 ? width - 3 : 77;
        tr_progress_live(t->line, sizeof t->line, p, width);
        tr_term_draw(t);
        return;
    }
    tr_progress_line(t->line, sizeof t->line - 1, p);
    strcat(t->line, "\n");
    tr_term_write(t, t->line, strlen(t->line));
}

/* Prints a message on a separate line; fmt needs no newline. The progress line is
   erased and redrawn below it. */
TR_DEF TR_PRINTF(2, 3) void tr_say(tr_term *t, const char *fmt, ...) {
    char text[2048];
    va_list args;
    int n;
    va_start(args, fmt);
    n = vsnprintf(text, sizeof text - 1, fmt, args);
    va_end(args);
    if (n < 0) return;
    if (n > (int)sizeof text - 2) n = (int)sizeof text - 2;
    if (t->tty) tr_fold(text, tr_columns(fileno(t->f)));
    text[n++] = '\n';
    if (t->shown) tr_term_write(t, "\r\033[K", 4);
    tr_term_write(t, text, (size_t)n);
    if (t->shown) tr_term_draw(t);
}

/* Replaces what a terminal might take for a command, that is, control characters other
   than newlines, and bytes that are not UTF-8, by question marks, and tabs by blanks. */
TR_DEF void tr_printable(char *text) {
    unsigned char *s = (unsigned char *)text;
    size_t n;
    for (; *s; s += n) {
        n = tr_utf8(s);
        if (*s == '\t') *s = ' ';
        else if (n == 0 || (*s < 32 && *s != '\n') || *s == 127) *s = '?';
        else if (*s == 0xC2 && s[1] < 0xA0) memset(s, '?', 2);
        if (n == 0) n = 1;
    }
}

/* Writes text that a model has generated: on a terminal, folded and without control
   characters; elsewhere, as it is. */
TR_DEF void tr_term_text(tr_term *t, tr_buf *text) {
    size_t i;
    for (i = 0; t->tty && i < text->n; i++)
        if (text->s[i] == 0) text->s[i] = 1;
    if (t->tty) {
        tr_printable(text->s);
        tr_fold(text->s, tr_columns(fileno(t->f)));
    }
    tr_term_write(t, text->s, text->n);
}

/* Moves the cursor below the last progress line, which remains visible. tr_show and
   tr_say can still be called afterwards. */
TR_DEF void tr_term_close(tr_term *t) {
    if (t->shown) tr_term_write(t, "\n", 1);
    t->shown = 0;
}
