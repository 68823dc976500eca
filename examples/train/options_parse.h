#pragma once
#include "base.h"
#include "options.h"
#include "options_values.h"
#include "options_guess.h"
#include "options_set.h"
#include "options_help.h"


// >>options: command line

/* Reports a word that does not begin with two dashes. `flag` is the flag before it, or
   NULL. */
TR_DEF int tr_not_option(const tr_options *o, const char *word, const tr_opt *flag, char *err,
                         size_t size) {
    if (flag != NULL)
        return tr_fail(err, size,
                       "--%s: expected no value after a flag, got '%.80s' (write --%s, --no-%s or "
                       "--%s=off)",
                       flag->name, word, flag->name, flag->name, flag->name);
    if (word[0] == '-') {
        size_t n = strcspn(word + 1, "=");
        const tr_opt *p = tr_find_option(o, word + 1, n);
        const char *meant = p != NULL ? p->name : tr_guess_option(o, word + 1, n);
        if (meant != NULL)
            return tr_fail(err, size,
                           "%.80s: unknown option (did you mean --%s?); --help lists all options",
                           word, meant);
    }
    return tr_fail(err, size,
                   "expected an option, got '%.80s': options begin with --, and --help lists them",
                   word);
}

/* The first pass over the command line: finds --preset and --help, and reports words
   that are neither options nor values. */
TR_DEF int tr_scan(const tr_options *o, int argc, char **argv, const char **preset, int *help,
                   char *err, size_t size) {
    const tr_opt *p, *flag = NULL;
    int i, used, no;
    for (i = 1; i < argc; i += used) {
        const char *next = i + 1 < argc && !tr_is_option(argv[i + 1]) ? argv[i + 1] : NULL;
        const char *word, *value;
        size_t n;
        used = 1;
        if (strcmp(argv[i], "-h") == 0) {       /* the only short option, by convention */
            *help = 1;
            continue;
        }
        if (!tr_is_option(argv[i]) || argv[i][2] == 0)
            return tr_not_option(o, argv[i], flag, err, size);

        word = argv[i] + 2;
        n = strcspn(word, "=");
        value = word[n] == '=' ? word + n + 1 : NULL;
        flag = NULL;
        if (tr_same_name(word, n, "help")) {
            *help = 1;
        } else if (tr_same_name(word, n, "preset")) {
            *preset = value != NULL ? value : next;
            if (*preset == NULL)
                return tr_fail(err, size, "--preset: expected the name of a preset, got nothing; "
                               "--help lists them");
            if (value == NULL) used = 2;
        } else {
            p = tr_find_word(o, word, n, &no);
            if (p == NULL) return tr_unknown_option(o, word, n, err, size);
            if (no || value != NULL) continue;
            if (p->type == TR_T_FLAG && !tr_accepts_number(p)) flag = p;
            else if (next != NULL && !tr_set_member(p, word, n)) used = 2;
        }
    }
    return 1;
}

/* Parses the command line. Returns 1 if the program should continue. Returns 2 if the
   help was printed to standard output and the program should exit with status 0. On
   error, returns 0 with a message in err, which the program should print before it
   exits with status 2 (or 1 if ferror(stdout): the help could not be printed). */
TR_DEF int tr_parse(tr_options *o, int argc, char **argv, char *err, size_t size) {
    const char *preset = NULL;
    int i, used, help = 0;
    if (!tr_reset(o, err, size) || !tr_check_table(o, err, size)) return 0;
    if (!tr_scan(o, argc, argv, &preset, &help, err, size)) return 0;
    if (preset != NULL && !tr_select_preset(o, preset, err, size)) return 0;
    if (help) return tr_print_help(o, err, size);

    for (i = 1; i < argc; i += used) {
        const char *word = argv[i] + 2;
        if (tr_same_name(word, strcspn(word, "="), "preset")) {
            used = strchr(word, '=') != NULL ? 1 : 2;
            continue;
        }
        used = tr_option(o, word, i + 1 < argc ? argv[i + 1] : NULL, TR_FROM_ARGS, err, size);
        if (!used) return 0;
    }
    return 1;
}

/* An option that has an effect only under a condition. If the condition does not hold,
   giving the option is an error, unless its value is 0 or off. */
typedef struct tr_only {
    const char *name;
    int         counts;     /* nonzero if the condition holds */
    const char *with;       /* the condition in words, for the error */
} tr_only;

TR_DEF int tr_check_only(const tr_options *o, const tr_only *only, size_t n, char *err,
                         size_t size) {
    char value[64];
    size_t i;
    for (i = 0; i < n; i++) {
        const tr_opt *p = tr_find_option(o, only[i].name, strlen(only[i].name));
        int off;
        if (p == NULL || p->from != TR_FROM_ARGS || only[i].counts) continue;
        tr_value(p, value);
        off = strcmp(value, "0") == 0 || strcmp(value, "false") == 0;
        if (off && p->type != TR_T_TEXT && p->type != TR_T_CHOICE) continue;
        return tr_fail(err, size, "--%s has no effect: it applies only to %s", only[i].name,
                       only[i].with);
    }
    return 1;
}
