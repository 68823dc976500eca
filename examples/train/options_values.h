#pragma once
#include "base.h"
#include "json.h"
#include "options.h"


// >>options: values

/* The next three functions parse a word that must be a decimal number in range. The
   strto* functions alone would accept blanks, "0x10" and "nan", and would wrap "-1" to
   a huge unsigned number. Each returns 1, or returns 0 and leaves *out unchanged. */
TR_DEF int tr_read_int(const char *s, int *out) {
    const char *digits = s + (s[0] == '-');
    long long v;
    if (*digits == 0 || strspn(digits, "0123456789") != strlen(digits)) return 0;
    errno = 0;
    v = strtoll(s, NULL, 10);
    if (errno != 0 || v < INT_MIN || v > INT_MAX) return 0;
    *out = (int)v;
    return 1;
}

TR_DEF int tr_read_size(const char *s, uint64_t *out) {
    unsigned long long v;
    if (*s == 0 || strspn(s, "0123456789") != strlen(s)) return 0;
    errno = 0;
    v = strtoull(s, NULL, 10);
    if (errno != 0 || v > UINT64_MAX) return 0;
    *out = (uint64_t)v;
    return 1;
}

TR_DEF int tr_read_real(const char *s, double *out) {
    char *end;
    double v;
    if (*s == 0 || strspn(s, "0123456789+-.eE") != strlen(s)) return 0;
    errno = 0;
    v = strtod(s, &end);
    if (errno != 0 || *end != 0 || !isfinite(v)) return 0;
    *out = v;
    return 1;
}

/* Parses "3,5,8" into `out`, which has space for `capacity` numbers, and stores their
   count in *n. Blanks and empty items are errors. */
TR_DEF int tr_read_sizes(const char *s, size_t *out, size_t capacity, size_t *n) {
    char word[24];
    uint64_t v;
    for (*n = 0; *n < capacity; s++) {
        size_t len = strcspn(s, ",");
        if (len >= sizeof word) return 0;
        memcpy(word, s, len);
        word[len] = 0;
        if (!tr_read_size(word, &v) || v > SIZE_MAX) return 0;
        out[(*n)++] = (size_t)v;
        s += len;
        if (!*s) return 1;
    }
    return 0;
}

TR_DEF int tr_read_flag(const char *s, int *out) {
    static const char *const words[] = {"0", "1", "false", "true", "no", "yes", "off", "on"};
    size_t i;
    for (i = 0; i < sizeof words / sizeof *words; i++) {
        if (strcmp(s, words[i]) != 0) continue;
        *out = (int)(i & 1);
        return 1;
    }
    return 0;
}

/* Nonzero if the option is a TR_SOME. */
TR_DEF int tr_accepts_number(const tr_opt *p) {
    return p->type == TR_T_FLAG && p->max > 0;
}

TR_DEF int tr_read_flag_or_number(const char *s, double max, int *out) {
    int n;
    if (strcmp(s, "auto") == 0) {
        *out = TR_AS_FITS;
        return 1;
    }
    if (tr_read_int(s, &n)) {
        *out = n;
        return n >= 0 && n <= max;
    }
    if (!tr_read_flag(s, &n)) return 0;
    *out = n ? TR_ALL : 0;
    return 1;
}

/* Nonzero if the option can be given with or without a value in the next word. */
TR_DEF int tr_value_is_optional(const tr_opt *p) {
    return tr_accepts_number(p) || p->type == TR_T_SET;
}

/* Parses "a,c", "all,no-b", on or off as the value of a TR_SET. If a name is unknown,
   returns 0 and stores the nearest name in *best. */
TR_DEF int tr_read_set(const tr_opt *p, const char *s, int *out, tr_nearest *best) {
    size_t n;
    int v, bits = 0, bit;
    if (tr_read_flag(s, &v)) {
        *out = v ? TR_EVERY : 0;
        return 1;
    }
    for (;; s += n + 1) {
        n = strcspn(s, ",");
        if (!bits && tr_same_name(s, n, "all")) bit = TR_EVERY;
        else if (bits & TR_EVERY && n > 3 && tr_same(s, "no-", 3))
            bit = tr_set_bit(p, s + 3, n - 3) << TR_REMOVED;
        else bit = tr_set_bit(p, s, n);
        if (!bit) {
            tr_consider_choices(best, s, n, p->choices);
            return 0;
        }
        bits |= bit;
        if (!s[n]) break;
    }
    *out = bits;
    return 1;
}

TR_DEF int tr_in_range(const tr_opt *p, double v) {
    if (p->min == 0 && p->max == 0) return 1;
    if (!(v >= p->min && v <= p->max)) return 0;
    if ((p->open & TR_OPEN_MIN) && v == p->min) return 0;
    if ((p->open & TR_OPEN_MAX) && v == p->max) return 0;
    return 1;
}

/* Writes the values that a TR_T_REAL accepts, such as "a number above 0". */
TR_DEF void tr_expected_real(const tr_opt *p, char *out, size_t size) {
    int bounded = !(p->min == 0 && p->max == 0);
    int has_min = bounded && p->min >= -DBL_MAX, has_max = bounded && p->max <= DBL_MAX;
    const char *at_least = p->open & TR_OPEN_MIN ? "above" : "of at least";
    const char *at_most = p->open & TR_OPEN_MAX ? "below" : "of at most";
    char lo[32], hi[32];
    tr_number(lo, p->min);
    tr_number(hi, p->max);
    if (!has_min && !has_max) snprintf(out, size, "a number");
    else if (!has_max) snprintf(out, size, "a number %s %s", at_least, lo);
    else if (!has_min) snprintf(out, size, "a number %s %s", at_most, hi);
    else if (!p->open) snprintf(out, size, "a number from %s to %s", lo, hi);
    else snprintf(out, size, "a number %s %s and %s %s", at_least, lo, at_most, hi);
}

/* Writes what an option accepts, such as "a whole number from 1 to 1000". */
TR_DEF void tr_expected(const tr_opt *p, char *out, size_t size) {
    int bounded = !(p->min == 0 && p->max == 0), lo = INT_MIN, hi = INT_MAX;
    uint64_t least = 0, most = UINT64_MAX;
    const char *s;
    size_t n;
    switch (p->type) {
    case TR_T_INT:
        if (bounded && p->min > INT_MIN) lo = (int)p->min;
        if (bounded && p->max < INT_MAX) hi = (int)p->max;
        snprintf(out, size, "a whole number from %d to %d", lo, hi);
        break;
    case TR_T_SIZE:
        if (bounded && p->min > 0) least = (uint64_t)p->min;
        if (bounded && p->max < 18446744073709551615.0) most = (uint64_t)p->max;
        snprintf(out, size, "a whole number from %" PRIu64 " to %" PRIu64, least, most);
        break;
    case TR_T_REAL: tr_expected_real(p, out, size); break;
    case TR_T_FLAG:
        if (tr_accepts_number(p))
            snprintf(out, size, "on, off, auto or a whole number up to %d", (int)p->max);
        else
            snprintf(out, size, "on or off (also 1, 0, true, false, yes, no)");
        break;
    case TR_T_CHOICE:
    case TR_T_SET:
        n = (size_t)snprintf(out, size, p->type == TR_T_SET ? "on, off, or any of " : "one of ");
        for (s = p->choices; *s != 0 && n + 3 < size; s++) {
            out[n++] = *s == '|' ? ',' : *s;
            if (*s == '|') out[n++] = ' ';
        }
        out[n] = 0;
        break;
    default: snprintf(out, size, "a text"); break;
    }
}

/* Reports a value that an option does not accept. `best` is the nearest name, if any. */
TR_DEF int tr_refuse(const tr_opt *p, const char *value, const tr_nearest *best, char *err,
                     size_t size) {
    char expected[256], hint[96] = "";
    tr_expected(p, expected, sizeof expected);
    if (best->name != NULL)
        snprintf(hint, sizeof hint, " (did you mean %.*s?)", (int)best->len, best->name);
    return tr_fail(err, size, "--%s: expected %s, got '%.80s'%s", p->name, expected, value, hint);
}

/* Stores a copy of a text in the option. A list that was already given is extended. */
TR_DEF int tr_set_copy(tr_opt *p, const char *value, int from) {
    int extend = p->max > 0 && from == TR_FROM_ARGS && p->from == from && p->own && *p->own;
    size_t len = extend ? strlen(p->own) + 1 : 0;
    char *copy = (char *)malloc(len + strlen(value) + 1);
    if (copy == NULL) return 0;
    if (extend) snprintf(copy, len + 1, "%s,", p->own);
    strcpy(copy + len, value);
    free(p->own);
    p->own = copy;
    *(const char **)p->to = copy;
    return 1;
}

/* Parses a value, checks its range and stores it in the option. A text is copied; see
   tr_options_free. */
TR_DEF int tr_set(tr_opt *p, const char *value, int from, char *err, size_t size) {
    int ok = 0, i = 0;
    uint64_t u = 0;
    double d = 0;
    tr_nearest best = {NULL, 0, 0};
    switch (p->type) {
    case TR_T_INT:
        ok = tr_read_int(value, &i) && tr_in_range(p, (double)i);
        if (ok) *(int *)p->to = i;
        break;
    case TR_T_SIZE:
        ok = tr_read_size(value, &u) && tr_in_range(p, (double)u);
        if (ok) *(uint64_t *)p->to = u;
        break;
    case TR_T_REAL:
        ok = tr_read_real(value, &d) && tr_in_range(p, d);
        if (ok) *(double *)p->to = d;
        break;
    case TR_T_FLAG:
        ok = tr_accepts_number(p) ? tr_read_flag_or_number(value, p->max, &i)
                                  : tr_read_flag(value, &i);
        if (ok) *(int *)p->to = i;
        break;
    case TR_T_CHOICE:
        i = tr_choice_index(p->choices, value, strlen(value));
        ok = i >= 0;
        if (ok) *(int *)p->to = i;
        else tr_consider_choices(&best, value, strlen(value), p->choices);
        break;
    case TR_T_SET:
        ok = tr_read_set(p, value, &i, &best);
        if (*p->choices == 0 && (!ok || i)) return tr_fail(err, size, "--%s: %s", p->name, p->help);
        if (ok) *(int *)p->to = i;
        break;
    case TR_T_TEXT:
        ok = tr_set_copy(p, value, from);
        if (!ok) return tr_fail(err, size, "--%s: out of memory: cannot store the value", p->name);
        break;
    default: break;
    }
    if (!ok) return tr_refuse(p, value, &best, err, size);
    p->from = from;
    return 1;
}
