#pragma once
#include "base.h"
#include "options_names.h"


// >>options: one table for parsing, checking, help and configuration

enum {
    TR_T_END, TR_T_GROUP, TR_T_INT, TR_T_SIZE, TR_T_REAL, TR_T_TEXT, TR_T_FLAG, TR_T_CHOICE,
    TR_T_SET
};

/* Sources of a value, in increasing order of precedence. TR_FROM_TEXT: the value was
   derived from the size of the training text and the time. */
enum { TR_FROM_DEFAULT, TR_FROM_TEXT, TR_FROM_CHECKPOINT, TR_FROM_PRESET, TR_FROM_ARGS };

/* Classes of options: see "Resuming" in the manual. The last two are flags that can be
   added to a class. */
enum {
    TR_LOCAL, TR_HINT, TR_FREE, TR_FIXED, TR_MODEL,
    TR_LATER = 8,       /* a checkpoint written before the option existed implies the default */
    TR_KEPT = 16        /* a TR_INIT run also takes this option from the checkpoint */
};

/* Why a checkpoint is opened. TR_LOOK: to evaluate or generate. TR_RESUME: to resume
   the run. TR_INIT: to start another run from its weights. */
enum { TR_LOOK, TR_RESUME, TR_INIT };

enum { TR_OPEN_MIN = 1, TR_OPEN_MAX = 2 };      /* the minimum or the maximum itself is excluded */
enum { TR_AS_FITS = -1, TR_ALL = INT_MAX };     /* "auto" and "on" as values of a TR_SOME */

/* Bits of the value of a TR_SET. TR_EVERY selects all names that apply, except name k if
   bit TR_REMOVED + k is set. A set has at most TR_REMOVED names. */
enum { TR_EVERY = 1 << 30, TR_REMOVED = 15 };

typedef struct {
    const char *name;       /* without leading dashes; for a group: its heading */
    int         type;       /* TR_T_... */
    void       *to;         /* variable that receives the value: int, uint64_t, double,
                               const char *. A flag, a choice (its index) and a set (its
                               bits) are int */
    const char *help;
    double      min, max;   /* inclusive bounds. Both 0: the range of the type; TR_INF:
                               unbounded. A flag with max > 0 is a TR_SOME */
    int         open;       /* TR_T_REAL: the excluded bounds, TR_OPEN_MIN, TR_OPEN_MAX or both.
                               TR_T_SET: the argument `training` of TR_SET */
    const char *choices;    /* choice and set: the names, such as "adagrad|sgd|adam"; otherwise
                               NULL */
    int         keep;       /* class: TR_LOCAL .. TR_MODEL, plus the flags TR_LATER and TR_KEPT */
    int         from;       /* out: source of the value, TR_FROM_... */
    char       *own;        /* out: copy of a text value; see tr_options_free */
    int         named;      /* out: the name on the command line. 0: none yet; 1: `name`; 2 + k:
                               the k-th of the names in tr_names */
} tr_opt;

#define TR_INF HUGE_VAL

/* Returns `to`. Does not compile unless `to` points to a `type`. */
#define TR_TO(type, to) ((void *)(1 ? (to) : (type *)NULL))

/* A row of the option table. The macros below fill in the fields that a type does not
   use. */
#define TR_ROW(name, type, to, help, min, max, open, choices, keep) \
    {name, type, to, help, min, max, open, choices, keep, 0, NULL, 0}

#define TR_GROUP(title) TR_ROW(title, TR_T_GROUP, NULL, NULL, 0, 0, 0, NULL, 0)
#define TR_END TR_ROW(NULL, TR_T_END, NULL, NULL, 0, 0, 0, NULL, 0)

#define TR_INT(name, keep, to, min, max, help) \
    TR_ROW(name, TR_T_INT, TR_TO(int, to), help, min, max, 0, NULL, keep)
#define TR_SIZE(name, keep, to, min, max, help) \
    TR_ROW(name, TR_T_SIZE, TR_TO(uint64_t, to), help, min, max, 0, NULL, keep)
#define TR_REAL(name, keep, to, min, max, help) \
    TR_REAL_OPEN(name, keep, to, 0, min, max, help)
#define TR_REAL_OPEN(name, keep, to, open, min, max, help) \
    TR_ROW(name, TR_T_REAL, TR_TO(double, to), help, min, max, open, NULL, keep)
#define TR_TEXT(name, keep, to, help) \
    TR_ROW(name, TR_T_TEXT, TR_TO(const char *, to), help, 0, 0, 0, NULL, keep)

/* A comma-separated list. If the option is given several times on the command line, the
   values are joined. A max of 1 distinguishes a list from a text. */
#define TR_LIST(name, keep, to, help) \
    TR_ROW(name, TR_T_TEXT, TR_TO(const char *, to), help, 0, 1, 0, NULL, keep)

#define TR_CHOICE(name, keep, to, choices, help) \
    TR_ROW(name, TR_T_CHOICE, TR_TO(int, to), help, 0, 0, 0, choices, keep)
#define TR_FLAG(name, keep, to, help) \
    TR_ROW(name, TR_T_FLAG, TR_TO(int, to), help, 0, 0, 0, NULL, keep)

/* A flag that also accepts a number. Its values are on (TR_ALL), off, 0 to max, and
   auto (TR_AS_FITS). */
#define TR_SOME(name, keep, to, max, help) \
    TR_ROW(name, TR_T_FLAG, TR_TO(int, to), help, 0, max, 0, NULL, keep)

/* --NAME a,c selects some of the names "a|b|c". The value is an int in which bit k
   represents name k. --NAME alone selects every name that applies, TR_EVERY. --NAME-a
   adds one name, and --no-NAME-a removes it; --NAME all,no-a selects all names except
   "a". `training` holds the bits that affect only training: in these bits, an
   evaluation or a run that starts from a checkpoint's weights may differ from the
   checkpoint. A set without names ("") cannot be switched on; its `help` says why. */
#define TR_SET(name, keep, to, names, training, help) \
    TR_ROW(name, TR_T_SET, TR_TO(int, to), help, 0, 0, training, names, keep)

typedef struct {
    const char *name, *about;       /* about: a one-line description */
    const char *set;                /* options separated by blanks, as in "name=value
                                       flag no-flag"; if an option occurs twice, the
                                       later value applies */
} tr_preset;

#define TR_PRESET_END {NULL, NULL, NULL}

/* The short help: the options that a beginner needs. */
typedef struct {
    const char *name, *takes;   /* option, and its value, such as "FILE"; "": none */
    const char *about;
} tr_basic;

typedef struct {
    const tr_basic *basic;      /* ends with a NULL name */
    const char     *examples;   /* command lines without the program, each ended by a newline */
} tr_brief;

typedef struct {
    const char      *program, *about;
    tr_opt          *opt;               /* terminated by TR_END */
    const tr_preset *preset;            /* terminated by TR_PRESET_END; NULL if there are none */
    const char      *defaults;          /* default values, in the form of tr_preset.set.
                                           An option that is not listed is 0, off, none or
                                           its first choice */
    const char      *after;             /* last paragraph of the help; may be NULL */
    char             preset_used[64];   /* out: name of the preset, or "" */
    const tr_brief  *brief;             /* NULL: --help prints everything */
    const char      *takes;             /* the arguments after the program in "usage:"; NULL:
                                           options only */
} tr_options;

/* Maps an underscore to a dash, because they are equivalent in names. */
TR_DEF char tr_dash(char c) {
    return c == '_' ? '-' : c;
}

/* Nonzero if the first n characters of two names are equal. */
TR_DEF int tr_same(const char *a, const char *b, size_t n) {
    size_t i;
    for (i = 0; i < n; i++) {
        if (tr_dash(a[i]) != tr_dash(b[i])) return 0;
        if (a[i] == 0) return 1;
    }
    return 1;
}

/* Nonzero if the n characters at `a` are the name b. */
TR_DEF int tr_same_name(const char *a, size_t n, const char *b) {
    return strlen(b) == n && tr_same(a, b, n);
}

/* Returns the k-th name in "a|b|c" and its length, or NULL if there are fewer names. */
TR_DEF const char *tr_choice(const char *choices, int k, size_t *len) {
    for (;; k--, choices += *len + 1) {
        *len = strcspn(choices, "|");
        if (k == 0) return *len > 0 ? choices : NULL;
        if (choices[*len] == 0) return NULL;
    }
}

/* Returns the index of a word of n characters in "a|b|c", or -1. choices may be NULL. */
TR_DEF int tr_choice_index(const char *choices, const char *word, size_t n) {
    const char *name;
    size_t len;
    int k;
    for (k = 0; choices != NULL && (name = tr_choice(choices, k, &len)) != NULL; k++)
        if (len == n && tr_same(word, name, n)) return k;
    return -1;
}

/* Returns the bit of a name in a TR_SET, or 0 if there is no such name. */
TR_DEF int tr_set_bit(const tr_opt *p, const char *name, size_t n) {
    int k = tr_choice_index(p->choices, name, n);
    return k < 0 ? 0 : 1 << k;
}

/* For a word that joins the name of the TR_SET p and one of its members, such as
   "literal-rows", returns the bit of the member. Otherwise, returns 0. */
TR_DEF int tr_set_member(const tr_opt *p, const char *word, size_t n) {
    size_t len = strlen(p->name);
    if (p->type != TR_T_SET || n < len + 2) return 0;
    if (!tr_same(word, p->name, len) || !tr_same(word + len, "-", 1)) return 0;
    return tr_set_bit(p, word + len + 1, n - len - 1);
}

/* Returns the bits of the names that are excluded from TR_EVERY. */
TR_DEF int tr_set_removed(int v) {
    return v & TR_EVERY ? v >> TR_REMOVED & ((1 << TR_REMOVED) - 1) : 0;
}

/* Returns the value without the bits that exclude names from TR_EVERY. */
TR_DEF int tr_set_given(int v) {
    return v & (TR_EVERY | ((1 << TR_REMOVED) - 1));
}

/* Returns the names that value v of the TR_SET selects, as bits. TR_EVERY selects all
   names except the removed ones, including names that do not apply. */
TR_DEF int tr_set_bits(const tr_opt *p, int v) {
    size_t len;
    int n = 0;
    if (!(v & TR_EVERY)) return v;
    while (tr_choice(p->choices, n, &len) != NULL) n++;
    return ((1 << n) - 1) & ~tr_set_removed(v);
}

/* Finds the option whose own name this is. Returns NULL if there is none. */
TR_DEF tr_opt *tr_find_exact(const tr_options *o, const char *name, size_t n) {
    tr_opt *p;
    for (p = o->opt; p->type != TR_T_END; p++)
        if (p->type != TR_T_GROUP && tr_same_name(name, n, p->name)) return p;
    return NULL;
}

/* Returns the other names of an option, as "a|b|c"; "" if there are none. In a program
   with both options, a name in two rows belongs to the first: see tr_find_option. */
TR_DEF const char *tr_also(const tr_opt *p) {
    size_t i;
    for (i = 0; i < TR_NAMES; i++)
        if (tr_same_name(p->name, strlen(p->name), tr_names[i].ours)) return tr_names[i].also;
    return "";
}

/* Finds an option by its name, another name (tr_names), or the joined names of a set and
   one of its members, as in "literal-rows". Returns NULL if there is none. */
TR_DEF tr_opt *tr_find_option(const tr_options *o, const char *name, size_t n) {
    tr_opt *p = tr_find_exact(o, name, n);
    size_t i;
    for (i = 0; p == NULL && i < TR_NAMES; i++)
        if (tr_choice_index(tr_names[i].also, name, n) >= 0)
            p = tr_find_exact(o, tr_names[i].ours, strlen(tr_names[i].ours));
    if (p != NULL) return p;
    for (p = o->opt; p->type != TR_T_END; p++)
        if (tr_set_member(p, name, n)) return p;
    return NULL;
}

/* Returns the letter's option if the word is a name of one letter, such as "-p" or
   "-p=x"; otherwise NULL. */
TR_DEF tr_opt *tr_find_letter(const tr_options *o, const char *word) {
    if (word[0] != '-' || word[1] == 0 || word[1] == '-') return NULL;
    return word[2] == 0 || word[2] == '=' ? tr_find_option(o, word + 1, 1) : NULL;
}

/* Nonzero if the word on the command line is an option: it begins with two dashes, or is
   the name of one letter. */
TR_DEF int tr_is_option(const tr_options *o, const char *word) {
    return (word[0] == '-' && word[1] == '-') || strcmp(word, "-h") == 0
           || tr_find_letter(o, word) != NULL;
}

/* Like tr_find_option, but also accepts "no-NAME". *no receives 1 for "no-NAME", and 0
   otherwise. */
TR_DEF tr_opt *tr_find_word(const tr_options *o, const char *word, size_t n, int *no) {
    tr_opt *p = tr_find_option(o, word, n);
    *no = 0;
    if (p != NULL || n < 4 || !tr_same(word, "no-", 3)) return p;
    p = tr_find_option(o, word + 3, n - 3);
    *no = p != NULL;
    return p;
}

TR_DEF const tr_preset *tr_find_preset(const tr_options *o, const char *name) {
    const tr_preset *p;
    for (p = o->preset; p != NULL && p->name != NULL; p++)
        if (tr_same_name(name, strlen(name), p->name)) return p;
    return NULL;
}

/* Nonzero if the option was given on the command line itself, not by a preset. */
TR_DEF int tr_given(const tr_options *o, const char *name) {
    const tr_opt *p = tr_find_option(o, name, strlen(name));
    return p != NULL && p->from == TR_FROM_ARGS;
}

/* Returns the Levenshtein distance of `a` and `b`: the least number of insertions,
   deletions and replacements that turn `a` into `b`. Only one row of the table is
   stored. If a name has more than 63 characters, the distance is infinite. */
TR_DEF size_t tr_distance(const char *a, size_t na, const char *b, size_t nb) {
    size_t row[64], i, j;
    if (na > 63 || nb > 63) return SIZE_MAX;
    for (j = 0; j <= nb; j++) row[j] = j;
    for (i = 1; i <= na; i++) {
        size_t diagonal = row[0];       /* row[i - 1][j - 1] */
        row[0] = i;
        for (j = 1; j <= nb; j++) {
            size_t best = diagonal + (tr_dash(a[i - 1]) != tr_dash(b[j - 1]));
            diagonal = row[j];
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            row[j] = best;
        }
    }
    return row[nb];
}

/* The candidate with the nearest spelling, if it is near enough to explain a typing
   error. */
typedef struct {
    const char *name;
    size_t      len, distance;
} tr_nearest;

TR_DEF void tr_consider(tr_nearest *best, const char *got, size_t got_len, const char *name,
                        size_t len) {
    size_t d = tr_distance(got, got_len, name, len);
    if (d <= 1 + got_len / 3 && d < len && (best->name == NULL || d < best->distance)) {
        best->name = name;
        best->len = len;
        best->distance = d;
    }
}

/* Considers each name in "a|b|c" as a candidate. */
TR_DEF void tr_consider_choices(tr_nearest *best, const char *got, size_t n, const char *choices) {
    const char *name;
    size_t len;
    int k;
    for (k = 0; (name = tr_choice(choices, k, &len)) != NULL; k++)
        tr_consider(best, got, n, name, len);
}
