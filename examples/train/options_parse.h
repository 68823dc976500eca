#pragma once
#include "base.h"
#include "options.h"
#include "options_values.h"
#include "options_guess.h"
#include "options_set.h"
#include "options_help.h"


// >>options: command line

/* Reports a word that is not an option. `flag` is the flag before it, or
   NULL. */
TR_DEF int tr_not_option(const tr_options *o, const char *word, const tr_opt *flag, char *err,
                         size_t size) {
    struct stat st;
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
                           "%.80s: unknown option (did you mean --%s?); --help all lists all "
                           "options", word, meant);
    }
    if (tr_find_exact(o, "data", 4) != NULL && tr_find_exact(o, "checkpoint", 10) != NULL
        && stat(word, &st) == 0)
        return tr_fail(err, size,
                       "expected an option, got '%.80s': give a text as --data %.80s, and a model "
                       "as --checkpoint FILE", word, word);
    return tr_fail(err, size,
                   "expected an option, got '%.80s': options begin with - or --; --help all lists "
                   "them", word);
}

/* A word of the command line that is an option. `name` is the word without its dashes. */
typedef struct {
    const char *name, *value;   /* value: the text after "=", or NULL */
    size_t      n;              /* length of the name */
} tr_argument;

TR_DEF tr_argument tr_read_argument(const char *word) {
    tr_argument a;
    a.name = word + 1 + (word[1] == '-');
    a.n = strcspn(a.name, "=");
    a.value = a.name[a.n] == '=' ? a.name + a.n + 1 : NULL;
    return a;
}

TR_DEF int tr_is_help(const tr_argument *a) {
    return tr_same_name(a->name, a->n, "help") || tr_same_name(a->name, a->n, "h");
}

/* What the first pass over the command line finds. */
typedef struct {
    const char *preset;     /* value of --preset, or NULL */
    const char *topic;      /* value of --help; "": --help without a value; NULL: no --help */
    int         unknown;    /* number of unknown options */
    tr_argument first;      /* the first of them */
    char        names[900]; /* all, with what they may mean; as many as fit */
} tr_found;

/* Adds an unknown option to those that were found. */
TR_DEF void tr_add_unknown(const tr_options *o, tr_argument a, tr_found *found) {
    const size_t used = strlen(found->names);
    char hint[160];
    tr_hint(o, a.name, a.n, hint);
    if (!found->unknown) found->first = a;
    if (used + strlen(hint) + 90 < sizeof found->names)
        snprintf(found->names + used, sizeof found->names - used, "%s--%.*s%s",
                 found->unknown ? ", " : "", (int)(a.n < 80 ? a.n : 80), a.name, hint);
    found->unknown++;
}

/* The first pass over the command line: finds --preset and --help, and reports words
   that are neither options nor values. A word after an unknown option is its value. */
TR_DEF int tr_scan_words(const tr_options *o, int argc, char **argv, tr_found *found, char *err,
                         size_t size) {
    const tr_opt *p, *flag = NULL;
    int i, used, no;
    for (i = 1; i < argc; i += used) {
        const char *next = i + 1 < argc && !tr_is_option(o, argv[i + 1]) ? argv[i + 1] : NULL;
        tr_argument a;
        used = 1;
        if (!tr_is_option(o, argv[i]) || strcmp(argv[i], "--") == 0)
            return tr_not_option(o, argv[i], flag, err, size);

        a = tr_read_argument(argv[i]);
        flag = NULL;
        if (tr_is_help(&a)) {
            found->topic = a.value != NULL ? a.value : next;
            if (a.value == NULL && next != NULL) used = 2;
            if (found->topic == NULL) found->topic = "";
        } else if (tr_same_name(a.name, a.n, "preset")) {
            found->preset = a.value != NULL ? a.value : next;
            if (found->preset == NULL)
                return tr_fail(err, size, "--preset: expected the name of a preset, got nothing; "
                               "--help presets lists them");
            if (a.value == NULL) used = 2;
        } else {
            p = tr_find_word(o, a.name, a.n, &no);
            if (p == NULL) {
                tr_add_unknown(o, a, found);
                if (a.value == NULL && next != NULL && next[0] != '-') used = 2;
                continue;
            }
            if (no || a.value != NULL) continue;
            if (p->type == TR_T_FLAG && !tr_accepts_number(p)) flag = p;
            else if (next != NULL && !tr_set_member(p, a.name, a.n)) used = 2;
        }
    }
    return 1;
}

/* The first pass, which reports all unknown options at once. */
TR_DEF int tr_scan(const tr_options *o, int argc, char **argv, tr_found *found, char *err,
                   size_t size) {
    const int ok = tr_scan_words(o, argc, argv, found, err, size);
    if (!found->unknown) return ok;
    if (found->unknown == 1)
        return tr_unknown_option(o, found->first.name, found->first.n, err, size);
    return tr_fail(err, size, "unknown options: %s; --help all lists all options", found->names);
}

/* Returns the number of the name by which a word calls an option, for the field `named`.
   A member of a set counts as the set's own name. */
TR_DEF int tr_which_name(const tr_opt *p, const char *name, size_t n) {
    return 2 + (tr_same_name(name, n, p->name) ? -1 : tr_choice_index(tr_also(p), name, n));
}

/* Writes the name of an option with its dashes. */
TR_DEF void tr_dashed(const tr_opt *p, int named, char out[80]) {
    size_t n = strlen(p->name);
    const char *name = named > 1 ? tr_choice(tr_also(p), named - 2, &n) : p->name;
    snprintf(out, 80, "%s%.*s", n == 1 ? "-" : "--", (int)(n < 70 ? n : 70), name);
}

/* Applies one option of the command line and returns the number of words used, or 0 on
   error. An option that is given by two of its names is an error, because a later value
   would silently replace the other; one name may be repeated. */
TR_DEF int tr_apply_argument(const tr_options *o, const char *word, const char *next, char *err,
                             size_t size) {
    const tr_argument a = tr_read_argument(word);
    char first[80], second[80], why[TR_ERR];
    int no, named, used;
    tr_opt *p = tr_find_word(o, a.name, a.n, &no);
    if (p == NULL) return tr_unknown_option(o, a.name, a.n, err, size);
    named = tr_which_name(p, a.name + 3 * no, a.n - 3 * (size_t)no);
    tr_dashed(p, named, second);
    if (p->named && p->named != named) {
        tr_dashed(p, p->named, first);
        return tr_fail(err, size, "%s and %s are the same option: give one of them", first, second);
    }
    p->named = named;
    used = tr_option(o, a.name, next, TR_FROM_ARGS, why, sizeof why);
    if (!used && named > 1)
        return tr_fail(err, size, "%.900s (%s is --%s)", why, second, p->name);
    return used ? used : tr_fail(err, size, "%s", why);
}

/* Parses the command line. Returns 1 if the program should continue. Returns 2 if the
   help was printed to standard output and the program should exit with status 0. On
   error, returns 0 with a message in err, which the program should print before it
   exits with status 2 (or 1 if ferror(stdout): the help could not be printed). */
TR_DEF int tr_parse(tr_options *o, int argc, char **argv, char *err, size_t size) {
    tr_found found;
    int i, used;
    memset(&found, 0, sizeof found);
    if (!tr_reset(o, err, size) || !tr_check_table(o, err, size)) return 0;
    if (!tr_scan(o, argc, argv, &found, err, size)) return 0;
    if (found.preset != NULL && !tr_select_preset(o, found.preset, err, size)) return 0;
    if (found.topic != NULL)
        return tr_print_help(o, tr_called(o, argc, argv), found.topic, err, size);

    for (i = 1; i < argc; i += used) {
        const tr_argument a = tr_read_argument(argv[i]);
        if (tr_same_name(a.name, a.n, "preset")) {
            used = a.value != NULL ? 1 : 2;
            continue;
        }
        used = tr_apply_argument(o, argv[i], i + 1 < argc ? argv[i + 1] : NULL, err, size);
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
