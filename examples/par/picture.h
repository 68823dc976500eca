/* par/picture.h - draws the probabilities of each block from the log as SVG (--picture).
   build/plot draws them too. */
#pragma once
#include "../train/base.h"
#include "../train/buffer.h"
#include "../train/json.h"
#include "../train/terminal.h"
#include "../svg.h"
#include "options.h"
#include "run.h"


// >>picture

/* The rows of a log. A row contains the step, then the probabilities of each block. */
typedef struct log_rows {
    size_t  width, count, capacity;
    double *row;
} log_rows;

/* Adds a row for this line of the log if the line contains newer probabilities. `list`
   is a buffer for their text. Returns 0 if memory runs out. */
TR_DEF int add_row(log_rows *rows, const char *line, char *list) {
    const size_t probabilities = rows->width - 1;
    double *now;
    char word[40];
    if (tr_json_find(line, "event", word, sizeof word) != 1 || strcmp(word, "train") != 0) return 1;
    if (tr_json_find(line, "pi", list, 32 * rows->width + 2) != 1) return 1;
    if (tr_json_find(line, "step", word, sizeof word) != 1) return 1;
    if (rows->count == rows->capacity) {
        size_t capacity = rows->capacity ? 2 * rows->capacity : 256;
        now = (double *)realloc(rows->row, capacity * rows->width * sizeof *now);
        if (!now) return 0;
        rows->row = now;
        rows->capacity = capacity;
    }
    now = rows->row + rows->count * rows->width;
    if (!svg_read(word, now)) return 1;
    if (svg_numbers(list, now + 1, probabilities) != probabilities) return 1;
    if (rows->count == 0 || now[0] > now[-(ptrdiff_t)rows->width]) rows->count++;
    return 1;
}

TR_DEF int draw_rows(const log_rows *rows, size_t blocks, char *err) {
    const double last = rows->row[(rows->count - 1) * rows->width], width = 900;
    svg_axis steps = {0, 0, 0, 0, 0};
    tr_buf body;
    double height;
    int ok;
    memset(&body, 0, sizeof body);
    steps.hi = last > 0 ? last : 1;
    height = svg_shares(&body, rows->row, rows->count, blocks, &steps, 10, 6, width - 20);
    ok = svg_save(opt.picture, "probabilities of each block", width, height + 12, &body, err,
                  TR_ERR);
    tr_buf_free(&body);
    return ok;
}

/* --picture: draws the probabilities of each block from the log. */
TR_DEF void picture(run *r) {
    log_rows rows;
    char *line = NULL, *list;
    size_t capacity = 0;
    FILE *in = fopen(opt.lm.log, "r");
    int ok;
    memset(&rows, 0, sizeof rows);
    rows.width = 1 + 3 * r->blocks;
    list = (char *)malloc(32 * rows.width + 2);
    ok = in && list;
    while (ok && getline(&line, &capacity, in) > 0) ok = add_row(&rows, line, list);
    if (!ok)
        stx_fail(r->t.x, STX_ERR_IO, "--picture %s: %s", opt.picture, strerror(errno));
    else if (!rows.count)
        tr_say(&r->t.term, "--picture: %s contains no probabilities of %zu blocks", opt.lm.log,
               r->blocks);
    else if (!draw_rows(&rows, r->blocks, r->t.err))
        stx_fail(r->t.x, STX_ERR_IO, "--picture %s", r->t.err);
    if (in) fclose(in);
    free(rows.row);
    free(line);
    free(list);
}
