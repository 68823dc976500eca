#pragma once
#include "base.h"
#include "buffer.h"
#include "options.h"
#include "options_values.h"
#include "options_set.h"


// >>options: help

/* Appends text, wrapped at `width` columns. Continuation lines begin at column `at`,
   where the cursor must already be. */
TR_DEF void tr_wrap(tr_buf *b, const char *text, size_t at, size_t width) {
    size_t column = at, n;
    while (*(text += strspn(text, " ")) != 0) {
        n = strcspn(text, " ");
        if (column > at && column + 1 + n > width) {
            tr_buf_puts(b, "\n");
            tr_buf_fill(b, ' ', at);
            column = at;
        }
        if (column > at) {
            tr_buf_puts(b, " ");
            column++;
        }
        tr_buf_put(b, text, n);
        column += n;
        text += n;
    }
    tr_buf_puts(b, "\n");
}

/* Returns the number of columns of the terminal at a file descriptor, or 0 if it is
   not a terminal. */
TR_DEF size_t tr_columns(int fd) {
    struct winsize w;
    memset(&w, 0, sizeof w);
    if (!isatty(fd)) return 0;
    if (ioctl(fd, TIOCGWINSZ, &w) == 0 && w.ws_col > 0) return w.ws_col;
    return 80;
}

/* Maximum length of a value in the "default" column. After a longer value, the help
   text begins on the next line. */
#define TR_HELP_DEFAULT 12

/* Column widths of the help, and the width of the whole text. */
typedef struct {
    size_t name, value, width;
} tr_help_layout;

TR_DEF void tr_help_row(tr_buf *b, const tr_help_layout *c, const char *name, const char *value,
                        const char *text) {
    size_t at = 2 + c->name + 2 + c->value + 2;
    tr_buf_printf(b, "  %-*s  %s", (int)c->name, name, value);
    if (strlen(value) > c->value) {
        tr_buf_puts(b, "\n");
        tr_buf_fill(b, ' ', at);
    } else {
        tr_buf_fill(b, ' ', c->value - strlen(value) + 2);
    }
    tr_wrap(b, text, at, c->width);
}

/* Writes "--name" and the kind of value that an option takes. */
TR_DEF void tr_help_name(const tr_opt *p, char name[96]) {
    static const char *const word[] = {"", "", " N", " N", " X", " TEXT", "", " NAME", " [NAMES]"};
    const char *takes = tr_accepts_number(p) ? " [N]" : word[p->type];
    if (p->type == TR_T_SET && *p->choices == 0) takes = "";
    snprintf(name, 96, "--%s%s", p->name, takes);
}

/* Returns the current value for the default column. `value` is a buffer for it. */
TR_DEF const char *tr_help_value(const tr_opt *p, char value[64]) {
    const char *text = p->type == TR_T_TEXT ? *(const char **)p->to : NULL;
    if (p->type == TR_T_TEXT) return text != NULL && *text ? text : "-";
    tr_value(p, value);
    if (p->type != TR_T_FLAG && p->type != TR_T_SET) return value;
    if (strcmp(value, "true") == 0) return "on";
    return strcmp(value, "false") == 0 ? "off" : value;
}

/* Writes the description of an option: its help, its choices and how to switch it
   off. */
TR_DEF void tr_help_text(const tr_opt *p, tr_buf *text) {
    text->n = 0;
    tr_buf_puts(text, p->help != NULL ? p->help : "");
    if (p->type == TR_T_CHOICE) tr_buf_printf(text, " (%s)", p->choices);
    if (p->type == TR_T_SET && *p->choices != 0)
        tr_buf_printf(text, " (%s, separated by commas; without names, all that apply)",
                      p->choices);
    if ((p->type == TR_T_FLAG || p->type == TR_T_SET) && *(int *)p->to)
        tr_buf_printf(text, " (switch off: --no-%s)", p->name);
}

TR_DEF void tr_help_presets(const tr_preset *preset, tr_buf *b, size_t width) {
    const tr_preset *p;
    size_t column = 0;
    for (p = preset; p->name != NULL; p++)
        if (strlen(p->name) > column) column = strlen(p->name);
    tr_buf_puts(b, "\nPresets\n");
    for (p = preset; p->name != NULL; p++) {
        tr_buf_printf(b, "  %-*s  ", (int)column, p->name);
        tr_wrap(b, p->about != NULL ? p->about : "", column + 4, width);
    }
}

/* Appends the help text to b. The "default" column shows the current values, so that
   after --preset NAME it shows the preset's values. */
TR_DEF void tr_help(const tr_options *o, tr_buf *b, size_t width) {
    const char *head = o->preset_used[0] ? "value" : "default";
    const tr_opt *p;
    tr_help_layout c;
    char name[96], value[64];
    size_t n;
    tr_buf text;
    memset(&text, 0, sizeof text);
    c.name = strlen("--preset NAME");
    c.value = strlen(head);
    c.width = width;
    for (p = o->opt; p->type != TR_T_END; p++) {
        if (p->type == TR_T_GROUP) continue;
        tr_help_name(p, name);
        if (strlen(name) > c.name) c.name = strlen(name);
        n = strlen(tr_help_value(p, value));
        if (n > c.value && n <= TR_HELP_DEFAULT) c.value = n;
    }

    tr_buf_printf(b, "usage: %s%s [--option value ...]\n\n", o->program,
                  o->preset != NULL ? " [--preset NAME]" : "");
    if (o->about != NULL) {
        tr_wrap(b, o->about, 0, width);
        tr_buf_puts(b, "\n");
    }
    if (o->preset_used[0])
        tr_buf_printf(b, "Values are those of --preset %s.\n\n", o->preset_used);
    tr_help_row(b, &c, "option", head, "meaning");
    tr_help_row(b, &c, "--help", "",
                "print this help and exit; with --preset NAME, show that preset's values");
    if (o->preset != NULL)
        tr_help_row(b, &c, "--preset NAME", o->preset_used[0] ? "" : "-",
                    "start from the settings of a preset (listed below); other options override "
                    "them");

    for (p = o->opt; p->type != TR_T_END; p++) {
        if (p->type == TR_T_GROUP) {
            tr_buf_printf(b, "\n%s\n", p->name);
            continue;
        }
        tr_help_name(p, name);
        tr_help_text(p, &text);
        tr_help_row(b, &c, name, tr_help_value(p, value), text.s != NULL ? text.s : "");
    }

    if (o->preset != NULL && o->preset->name != NULL) tr_help_presets(o->preset, b, width);
    if (o->after != NULL) {
        tr_buf_puts(b, "\n");
        tr_wrap(b, o->after, 0, width);
    }
    if (text.oom) b->oom = 1;
    tr_buf_free(&text);
}

/* Prints the help to standard output. Returns 2, or 0 on error. */
TR_DEF int tr_print_help(const tr_options *o, char *err, size_t size) {
    size_t width = tr_columns(1);
    tr_buf b;
    int ok;
    if (width < 60) width = 100;
    if (width > 120) width = 120;
    memset(&b, 0, sizeof b);
    tr_help(o, &b, width);
    if (b.oom) errno = ENOMEM;
    ok = !b.oom && fwrite(b.s, 1, b.n, stdout) == b.n && fflush(stdout) == 0;
    tr_buf_free(&b);
    return ok ? 2 : tr_fail(err, size, "cannot print the help: %s", strerror(errno));
}
