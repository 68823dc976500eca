#pragma once
#include "base.h"
#include "options_names.h"
#include "options.h"


// >>options: names that do not exist

/* Nonzero if exactly one of the names `got` and `name` is negated, that is, begins with
   "no-". If `name` is negated, a `got` that begins with "no" counts as negated, because
   it may be a misspelled "no-". */
TR_DEF int tr_is_opposite(const char *got, size_t n, const char *name) {
    if (tr_same(name, "no-", 3)) return !(n > 2 && tr_same(got, "no", 2));
    return n > 3 && tr_same(got, "no-", 3);
}

/* Returns the option that an unknown name probably means: the option that has this name
   in other programs, or else the shortest option that begins with the name, or else an
   option one of whose names has nearly the same spelling, or else the longest option with
   which the name begins. Returns NULL if there is none. */
TR_DEF const char *tr_guess_option(const tr_options *o, const char *name, size_t n) {
    tr_nearest best = {NULL, 0, 0};
    const char *nearest = NULL;
    const tr_opt *p;
    size_t i, len;
    for (i = 0; i < TR_NAMES; i++) {
        if (tr_choice_index(tr_names[i].like, name, n) < 0) continue;
        p = tr_find_exact(o, tr_names[i].ours, strlen(tr_names[i].ours));
        if (p != NULL) return p->name;
    }

    for (p = o->opt; n > 1 && p->type != TR_T_END; p++) {
        if (p->type == TR_T_GROUP) continue;
        len = strlen(p->name);
        if (len <= n || !tr_same(name, p->name, n) || (best.name && len >= best.len)) continue;
        best.name = p->name;
        best.len = len;
    }
    if (best.name != NULL) return best.name;

    tr_consider(&best, name, n, "help", 4);
    if (o->preset != NULL) tr_consider(&best, name, n, "preset", 6);
    for (p = o->opt; p->type != TR_T_END; p++)
        if (p->type != TR_T_GROUP && !tr_is_opposite(name, n, p->name))
            tr_consider(&best, name, n, p->name, strlen(p->name));
    if (best.name != NULL) return best.name;

    for (i = 0; n > 3 && !tr_same(name, "no-", 3) && i < TR_NAMES; i++) {
        const char *before = best.name;
        p = tr_find_exact(o, tr_names[i].ours, strlen(tr_names[i].ours));
        if (p != NULL) tr_consider_choices(&best, name, n, tr_names[i].also);
        if (best.name != before) nearest = p->name;
    }
    if (nearest != NULL) return nearest;

    for (p = o->opt; p->type != TR_T_END; p++) {
        if (p->type == TR_T_GROUP) continue;
        len = strlen(p->name);
        if (len >= n || len <= best.len || tr_dash(name[len]) != '-') continue;
        if (!tr_same(name, p->name, len)) continue;
        best.name = p->name;
        best.len = len;
    }
    return best.name;
}

/* Writes what an unknown name may mean, such as " (did you mean --x?)", or "". */
TR_DEF void tr_hint(const tr_options *o, const char *name, size_t n, char out[160]) {
    tr_nearest best = {NULL, 0, 0};
    const char *meant = NULL, *no = "";
    const tr_opt *p;
    size_t i;
    for (i = 0; i < TR_NOTES; i++) {
        if (tr_choice_index(tr_notes[i].names, name, n) < 0) continue;
        snprintf(out, 160, " (%s)", tr_notes[i].note);
        return;
    }
    meant = tr_guess_option(o, name, n);
    if (meant == NULL && n > 3 && tr_same(name, "no-", 3)) {
        for (p = o->opt; p->type != TR_T_END; p++)
            if ((p->type == TR_T_FLAG || p->type == TR_T_SET) && !tr_same(p->name, "no-", 3))
                tr_consider(&best, name + 3, n - 3, p->name, strlen(p->name));
        meant = best.name;
        no = "no-";
    }
    out[0] = 0;
    if (meant != NULL) snprintf(out, 160, " (did you mean --%s%s?)", no, meant);
}

TR_DEF int tr_unknown_option(const tr_options *o, const char *name, size_t n, char *err,
                             size_t size) {
    char hint[160];
    tr_hint(o, name, n, hint);
    return tr_fail(err, size, "--%.*s: unknown option%s; --help all lists all options",
                   (int)(n < 80 ? n : 80), name, hint);
}
