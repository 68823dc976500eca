#pragma once
#include "base.h"
#include "buffer.h"
#include "options.h"
#include "options_values.h"
#include "options_set.h"
#include "options_guess.h"


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

/* The name of an option begins in column 2 and its description in column `at`, on the
   next line if the name is too long. */
typedef struct {
    size_t at, width;
} tr_help_layout;

TR_DEF tr_help_layout tr_help_columns(size_t width) {
    tr_help_layout c;
    c.at = width < 60 ? 6 : 28;
    c.width = width;
    return c;
}

TR_DEF void tr_help_row(tr_buf *b, const tr_help_layout *c, const char *name, const char *text) {
    const size_t n = 2 + strlen(name);
    tr_buf_printf(b, "  %s", name);
    if (n >= c->at) tr_buf_puts(b, "\n");
    tr_buf_fill(b, ' ', n >= c->at ? c->at : c->at - n);
    tr_wrap(b, text, c->at, c->width);
}

/* Writes the other names by which the program accepts the option. letters is 1 for the
   names of one letter, each with `before` and `after`, and 0 for a list of the longer
   ones, with `before` before the first. */
TR_DEF void tr_help_also(const tr_options *o, const tr_opt *p, int letters, const char *before,
                         const char *after, tr_buf *b) {
    const char *name;
    size_t n;
    int k;
    for (k = 0; (name = tr_choice(tr_also(p), k, &n)) != NULL; k++)
        if ((n == 1) == letters && tr_find_option(o, name, n) == p) {
            tr_buf_printf(b, "%s%.*s%s", before, (int)n, name, after);
            if (!letters) before = ", --";
        }
}

/* Writes the option's names of one letter, "--name" and the kind of its value: `takes`
   or, if it is NULL, a word for the type. */
TR_DEF void tr_help_name(const tr_options *o, const tr_opt *p, const char *takes, tr_buf *name) {
    static const char *const word[] = {"", "", "N", "N", "X", "TEXT", "", "NAME", "[NAMES]"};
    const char *none = p->type == TR_T_SET && *p->choices == 0 ? "" : word[p->type];
    if (takes == NULL) takes = tr_accepts_number(p) ? "[N]" : none;
    name->n = 0;
    tr_help_also(o, p, 1, "-", ", ", name);
    tr_buf_printf(name, "--%s%s%s", p->name, *takes ? " " : "", takes);
}

/* Returns the current value, or NULL if there is none. `value` is a buffer for it. */
TR_DEF const char *tr_help_value(const tr_opt *p, char value[64]) {
    const char *text = p->type == TR_T_TEXT ? *(const char **)p->to : NULL;
    if (p->type == TR_T_TEXT) return text != NULL && *text ? text : NULL;
    tr_value(p, value);
    if (p->type != TR_T_FLAG && p->type != TR_T_SET) return value;
    if (strcmp(value, "true") == 0) return "on";
    return strcmp(value, "false") == 0 ? "off" : value;
}

/* Writes the description of an option: its help, its choices, how to switch it off, its
   longer names and its value. */
TR_DEF void tr_help_text(const tr_options *o, const tr_opt *p, tr_buf *text) {
    const char *name, *shown;
    char value[64];
    size_t n;
    int k;
    text->n = 0;
    tr_buf_puts(text, p->help != NULL ? p->help : "");
    if (p->type == TR_T_CHOICE || (p->type == TR_T_SET && *p->choices != 0)) {
        for (k = 0; (name = tr_choice(p->choices, k, &n)) != NULL; k++)
            tr_buf_printf(text, "%s%.*s", k ? ", " : " (", (int)n, name);
        tr_buf_puts(text, p->type == TR_T_SET ? "; separated by commas; without names, all that "
                                                "apply)" : ")");
    }
    if ((p->type == TR_T_FLAG || p->type == TR_T_SET) && *(int *)p->to)
        tr_buf_printf(text, " (switch off: --no-%s)", p->name);
    tr_help_also(o, p, 0, "; also --", "", text);
    shown = tr_help_value(p, value);
    if (shown != NULL) tr_buf_printf(text, " [%s]", shown);
}

TR_DEF void tr_help_presets(const tr_preset *preset, tr_buf *b, size_t width) {
    const tr_help_layout c = tr_help_columns(width);
    const tr_preset *p;
    tr_buf_puts(b, "\nPresets\n");
    for (p = preset; p->name != NULL; p++)
        tr_help_row(b, &c, p->name, p->about != NULL ? p->about : "");
}

/* Appends the row of an option. name and text are buffers. */
TR_DEF void tr_help_option(const tr_options *o, const tr_opt *p, const tr_help_layout *c,
                           tr_buf *name, tr_buf *text, tr_buf *b) {
    tr_help_name(o, p, NULL, name);
    tr_help_text(o, p, text);
    if (!name->oom && !text->oom) tr_help_row(b, c, name->s, text->s);
}

TR_DEF void tr_help_usage(const tr_options *o, tr_buf *b, size_t width) {
    const char *takes = o->takes;
    if (takes == NULL)
        takes = o->preset != NULL ? "[--preset NAME] [--option value ...]" : "[--option value ...]";
    tr_buf_printf(b, "usage: %s ", o->program);
    tr_wrap(b, takes, strlen("usage:  ") + strlen(o->program), width);
    tr_buf_puts(b, "\n");
    if (o->about == NULL) return;
    tr_wrap(b, o->about, 0, width);
    tr_buf_puts(b, "\n");
}

/* Appends the whole help or, if `from` is not NULL, only that option or group. The values
   in brackets are the current ones, so that after --preset NAME they are the preset's. */
TR_DEF void tr_help(const tr_options *o, const tr_opt *from, tr_buf *b, size_t width) {
    const tr_help_layout c = tr_help_columns(width);
    const tr_opt *p = from != NULL ? from : o->opt;
    tr_buf name, text;
    memset(&name, 0, sizeof name);
    memset(&text, 0, sizeof text);
    if (from == NULL) {
        tr_help_usage(o, b, width);
        tr_help_row(b, &c, "option", o->preset_used[0] ? "meaning [value]" : "meaning [default]");
        tr_help_row(b, &c, o->brief != NULL ? "-h, --help [WHAT]" : "-h, --help",
                    o->brief != NULL ? "the most important options; all: this text; presets, an "
                                       "option or a group: only these; with --preset NAME: all, "
                                       "with that preset's values"
                                     : "print this text");
        if (o->preset != NULL)
            tr_help_row(b, &c, "--preset NAME",
                        "start from the settings of a preset (listed below); other options "
                        "override them");
    }
    if (o->preset_used[0]) {
        tr_buf_printf(&text, "Values in brackets are those of --preset %s.", o->preset_used);
        tr_buf_puts(b, "\n");
        if (!text.oom) tr_wrap(b, text.s, 0, width);
    }

    do {
        if (p->type == TR_T_GROUP) tr_buf_printf(b, "%s%s\n", from != p ? "\n" : "", p->name);
        else if (p->type != TR_T_END) tr_help_option(o, p, &c, &name, &text, b);
        if (from != NULL && from->type != TR_T_GROUP) break;
        if (p->type != TR_T_END) p++;
    } while (p->type != TR_T_END && (from == NULL || p->type != TR_T_GROUP));

    if (from == NULL && o->preset != NULL && o->preset->name != NULL)
        tr_help_presets(o->preset, b, width);
    if (from == NULL && o->after != NULL) {
        tr_buf_puts(b, "\n");
        tr_wrap(b, o->after, 0, width);
    }
    if (name.oom || text.oom) b->oom = 1;
    tr_buf_free(&name);
    tr_buf_free(&text);
}

/* Appends the examples of the short help. `called` is the name of the program. */
TR_DEF void tr_help_examples(const tr_options *o, const char *called, tr_buf *b) {
    const char *line = o->brief->examples;
    while (*line) {
        const size_t n = strcspn(line, "\n");
        tr_buf_printf(b, "  %s %.*s\n", called, (int)n, line);
        line += n + (line[n] != 0);
    }
}

/* Appends the short help. */
TR_DEF void tr_help_brief(const tr_options *o, const char *called, tr_buf *b, size_t width) {
    const tr_help_layout c = tr_help_columns(width);
    const tr_basic *basic;
    tr_buf name;
    memset(&name, 0, sizeof name);
    if (o->about != NULL) tr_wrap(b, o->about, 0, width);
    tr_buf_puts(b, "\n");
    for (basic = o->brief->basic; basic->name != NULL; basic++) {
        const tr_opt *p = tr_find_exact(o, basic->name, strlen(basic->name));
        name.n = 0;
        if (p != NULL) tr_help_name(o, p, basic->takes, &name);
        else tr_buf_printf(&name, "--%s %s", basic->name, basic->takes);
        if (!name.oom) tr_help_row(b, &c, name.s, basic->about);
    }
    tr_buf_puts(b, "\n");
    tr_help_examples(o, called, b);
    tr_buf_puts(b, "\n");
    tr_wrap(b, "--help all lists all options, --help presets the presets, --help NAME explains "
            "one option or group.", 0, width);
    if (name.oom) b->oom = 1;
    tr_buf_free(&name);
}

/* Returns how many characters of a topic are those of a heading, whatever their case. */
TR_DEF size_t tr_help_match(const char *heading, const char *topic) {
    size_t i;
    for (i = 0; topic[i] && heading[i]; i++) {
        const int a = heading[i] == ' ' ? '-' : heading[i] | 32;
        const int b = topic[i] == ' ' ? '-' : tr_dash(topic[i]) | 32;
        if (a != b && a != topic[i]) break;
    }
    return i;
}

/* Returns the row that --help `topic` explains: the group with this heading, or else an
   option, or else a group whose heading begins with the topic. Returns NULL if there is
   none. */
TR_DEF const tr_opt *tr_help_topic(const tr_options *o, const char *topic) {
    const size_t n = strlen(topic);
    const size_t dashes = topic[0] == '-' ? 1 + (size_t)(topic[1] == '-') : 0;
    const tr_opt *p, *group = NULL;
    for (p = o->opt; p->type != TR_T_END; p++) {
        if (p->type != TR_T_GROUP || tr_help_match(p->name, topic) < n) continue;
        if (p->name[n] == 0) return p;
        if (group == NULL) group = p;
    }
    p = tr_find_option(o, topic + dashes, n - dashes);
    return p != NULL ? p : group;
}

/* Returns the name by which the program was called if it is short enough for the
   examples; otherwise the program's own name. */
TR_DEF const char *tr_called(const tr_options *o, int argc, char **argv) {
    const size_t n = argc > 0 && argv[0] != NULL ? strlen(argv[0]) : 0;
    return n > 0 && n <= 26 ? argv[0] : o->program;
}

/* Appends the help that --help `topic` requests. */
TR_DEF int tr_choose_help(const tr_options *o, const char *called, const char *topic, tr_buf *b,
                          size_t width, char *err, size_t size) {
    const char *meant;
    const tr_opt *p;
    if (strcmp(topic, "all") == 0 || (*topic == 0 && (o->brief == NULL || o->preset_used[0]))) {
        tr_help(o, NULL, b, width);
        return 1;
    }
    if (*topic == 0) {
        tr_help_brief(o, called, b, width);
        return 1;
    }
    if (o->preset != NULL && strcmp(topic, "presets") == 0) {
        tr_help_presets(o->preset, b, width);
        return 1;
    }
    p = tr_help_topic(o, topic);
    if (p != NULL) {
        tr_help(o, p, b, width);
        return 1;
    }
    meant = tr_guess_option(o, topic, strlen(topic));
    return tr_fail(err, size, "--help: expected all, or the name of an option or group, got '%.80s'"
                   "%s%s%s; --help all lists them", topic, meant != NULL ? " (did you mean " : "",
                   meant != NULL ? meant : "", meant != NULL ? "?)" : "");
}

/* Prints the help to standard output. Returns 2, or 0 on error. */
TR_DEF int tr_print_help(const tr_options *o, const char *called, const char *topic, char *err,
                         size_t size) {
    size_t width = tr_columns(1);
    tr_buf b;
    int ok;
    if (width == 0 || width > 80) width = 80;
    memset(&b, 0, sizeof b);
    ok = tr_choose_help(o, called, topic, &b, width, err, size);
    if (ok) {
        if (b.oom) errno = ENOMEM;
        ok = !b.oom && fwrite(b.s, 1, b.n, stdout) == b.n && fflush(stdout) == 0;
        if (!ok) tr_fail(err, size, "cannot print the help: %s", strerror(errno));
    }
    tr_buf_free(&b);
    return ok ? 2 : 0;
}
