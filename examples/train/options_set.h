#pragma once
#include "base.h"
#include "buffer.h"
#include "json.h"
#include "options.h"
#include "options_values.h"
#include "options_guess.h"


// >>options: setting them

/* Switches one name of a TR_SET on or off, according to value ("on", "off", ..). NULL
   means on. */
TR_DEF int tr_switch_name(tr_opt *p, const char *word, int bit, const char *value, int from,
                          char *err, size_t size) {
    int on = 1, *v = (int *)p->to;
    if (value != NULL && !tr_read_flag(value, &on))
        return tr_fail(err, size, "--%.*s: expected on or off, got '%.80s'",
                       (int)strcspn(word, "="), word, value);
    if (on) *v = (*v | bit) & ~(bit << TR_REMOVED);
    else *v &= ~bit;
    if (!on && *v & TR_EVERY) *v |= bit << TR_REMOVED;
    p->from = from;
    return 1;
}

/* Applies "no-NAME". value is the text after "=", or NULL. */
TR_DEF int tr_option_off(tr_opt *p, const char *word, size_t n, const char *value, int from,
                         char *err, size_t size) {
    int bit = tr_set_member(p, word + 3, n - 3);
    if (p->type != TR_T_FLAG && p->type != TR_T_SET)
        return tr_fail(err, size, "--%.*s: --%s is not a flag and cannot be switched off", (int)n,
                       word, p->name);
    if (value != NULL)
        return tr_fail(err, size, "--no-%s: expected no value, got '%.80s'", p->name, value);
    return bit ? tr_switch_name(p, word, bit, "off", from, err, size)
               : tr_set(p, "off", from, err, size);
}

/* Applies one option. `word` is "name", "name=value" or "no-name", and `next` is the
   following word, or NULL. Returns the number of words used (1 or 2), or 0 on error. */
TR_DEF int tr_option(const tr_options *o, const char *word, const char *next, int from, char *err,
                     size_t size) {
    size_t n = strcspn(word, "=");
    const char *value = word[n] == '=' ? word + n + 1 : NULL;
    char expected[256];
    int no, bit, flag;
    tr_opt *p = tr_find_word(o, word, n, &no);
    if (p == NULL) return tr_unknown_option(o, word, n, err, size);
    if (no) return tr_option_off(p, word, n, value, from, err, size);

    bit = tr_set_member(p, word, n);
    if (bit) return tr_switch_name(p, word, bit, value, from, err, size);
    if (value != NULL) return tr_set(p, value, from, err, size);

    flag = p->type == TR_T_FLAG || p->type == TR_T_SET;
    if (flag && (!tr_value_is_optional(p) || next == NULL || tr_is_option(o, next)))
        return tr_set(p, "on", from, err, size);
    if (next != NULL && !tr_is_option(o, next)) return tr_set(p, next, from, err, size) ? 2 : 0;

    tr_expected(p, expected, sizeof expected);
    if (next == NULL)
        return tr_fail(err, size, "--%s: expected %s, got nothing", p->name, expected);
    return tr_fail(err, size,
                   "--%s: expected %s, got the option '%.80s' (if that is the value, write "
                   "--%s=%.80s)", p->name, expected, next, p->name, next);
}

/* Copies the next word of a line "name=value flag no-flag" and advances *line past the
   word. Returns 0 at the end, and -1 with *line unchanged if the word is too long. */
TR_DEF int tr_next_word(const char **line, char *word, size_t size) {
    const char *at = *line != NULL ? *line + strspn(*line, " ") : "";
    size_t n = strcspn(at, " ");
    if (n == 0) return 0;
    if (n >= size) return -1;
    memcpy(word, at, n);
    word[n] = 0;
    *line = at + n;
    return 1;
}

/* Applies the options in a line "name=value flag no-flag". An option whose value comes
   from a source of higher precedence keeps that value. */
TR_DEF int tr_apply(const tr_options *o, const char *line, int from, char *err, size_t size) {
    char word[256];
    int more, no;
    while ((more = tr_next_word(&line, word, sizeof word)) > 0) {
        const tr_opt *p = tr_find_word(o, word, strcspn(word, "="), &no);
        if (p != NULL && p->from > from) continue;
        if (!tr_option(o, word, NULL, from, err, size)) return 0;
    }
    if (more < 0)
        return tr_fail(err, size, "expected words of at most %zu characters, got '%.60s..'",
                       sizeof word - 1, line + strspn(line, " "));
    return 1;
}

TR_DEF int tr_apply_preset(tr_options *o, const tr_preset *preset, char *err, size_t size) {
    char why[TR_ERR];
    if (!tr_apply(o, preset->set, TR_FROM_PRESET, why, sizeof why))
        return tr_fail(err, size, "preset %s: %.900s", preset->name, why);
    snprintf(o->preset_used, sizeof o->preset_used, "%s", preset->name);
    return 1;
}

/* Resets every option to its default. */
TR_DEF int tr_reset(tr_options *o, char *err, size_t size) {
    char why[TR_ERR];
    tr_opt *p;
    o->preset_used[0] = 0;
    for (p = o->opt; p->type != TR_T_END; p++) {
        p->from = TR_FROM_DEFAULT;
        p->named = 0;
        switch (p->type) {
        case TR_T_INT:
        case TR_T_FLAG:
        case TR_T_CHOICE:
        case TR_T_SET: *(int *)p->to = 0; break;
        case TR_T_SIZE: *(uint64_t *)p->to = 0; break;
        case TR_T_REAL: *(double *)p->to = 0; break;
        case TR_T_TEXT:
            *(const char **)p->to = NULL;
            free(p->own);
            p->own = NULL;
            break;
        default: break;
        }
    }
    if (!tr_apply(o, o->defaults, TR_FROM_DEFAULT, why, sizeof why))
        return tr_fail(err, size, "option table: invalid default: %.900s", why);
    return 1;
}

/* Frees the copies of text values. */
TR_DEF void tr_options_free(tr_options *o) {
    tr_opt *p;
    for (p = o->opt; p->type != TR_T_END; p++) {
        if (p->own == NULL) continue;
        *(const char **)p->to = NULL;
        free(p->own);
        p->own = NULL;
    }
}

/* Applies the preset with this name. If there is none, the error lists all presets. */
TR_DEF int tr_select_preset(tr_options *o, const char *name, char *err, size_t size) {
    const tr_preset *p = tr_find_preset(o, name);
    tr_nearest best = {NULL, 0, 0};
    tr_buf names;
    if (p != NULL) return tr_apply_preset(o, p, err, size);
    if (o->preset == NULL || o->preset->name == NULL)
        return tr_fail(err, size, "--preset '%.80s': this program has no presets", name);

    memset(&names, 0, sizeof names);
    for (p = o->preset; p->name != NULL; p++) {
        tr_consider(&best, name, strlen(name), p->name, strlen(p->name));
        tr_buf_printf(&names, "%s%s", names.n ? ", " : "", p->name);
    }
    if (best.name != NULL)
        tr_fail(err, size, "--preset: expected one of %s, got '%.80s' (did you mean %s?)",
                names.oom ? "" : names.s, name, best.name);
    else
        tr_fail(err, size, "--preset: expected one of %s, got '%.80s'", names.oom ? "" : names.s,
                name);
    tr_buf_free(&names);
    return 0;
}

/* Writes the value of a TR_SET: "true", "false", a list of names, or "all,no-b". */
TR_DEF void tr_set_text(const tr_opt *p, char out[64]) {
    const char *name, *no = "";
    size_t len, at = 0;
    int k, v = *(int *)p->to;
    strcpy(out, v & TR_EVERY ? "true" : "false");
    if (v & TR_EVERY) {
        v = tr_set_removed(v);
        no = "no-";
        if (v) at = (size_t)snprintf(out, 64, "all");
    }
    for (k = 0; v && (name = tr_choice(p->choices, k, &len)) != NULL; k++) {
        if (!(v >> k & 1) || at + len + 5 > 64) continue;
        at += (size_t)snprintf(out + at, 64 - at, "%s%s%.*s", at ? "," : "", no, (int)len, name);
    }
}

/* Writes the current value in JSON form but without quotes. For a text option, writes
   "". */
TR_DEF void tr_value(const tr_opt *p, char out[64]) {
    size_t len = 0;
    const char *s;
    out[0] = 0;
    switch (p->type) {
    case TR_T_INT: snprintf(out, 64, "%d", *(int *)p->to); break;
    case TR_T_SIZE: snprintf(out, 64, "%" PRIu64, *(uint64_t *)p->to); break;
    case TR_T_REAL: tr_number(out, *(double *)p->to); break;
    case TR_T_FLAG:
        if (tr_accepts_number(p) && *(int *)p->to == TR_AS_FITS)
            strcpy(out, "auto");
        else if (tr_accepts_number(p) && *(int *)p->to && *(int *)p->to != TR_ALL)
            snprintf(out, 64, "%d", *(int *)p->to);
        else
            strcpy(out, *(int *)p->to ? "true" : "false");
        break;
    case TR_T_CHOICE:
        s = *(int *)p->to < 0 ? NULL : tr_choice(p->choices, *(int *)p->to, &len);
        if (s != NULL) snprintf(out, 64, "%.*s", (int)(len < 63 ? len : 63), s);
        break;
    case TR_T_SET: tr_set_text(p, out); break;
    default: break;
    }
}

/* Checks one row of the option table: its name and its default. */
TR_DEF int tr_check_row(const tr_opt *p, char *err, size_t size) {
    const size_t n = strlen(p->name);
    const tr_opt *q;
    char text[64];
    int ok = 1;
    if (tr_same_name(p->name, n, "help") || tr_same_name(p->name, n, "preset") || n == 0 || n > 63)
        return tr_fail(err, size, "option table: the name '%.80s' is reserved, empty or too long",
                       p->name);
    for (q = p + 1; q->type != TR_T_END; q++)
        if (q->type != TR_T_GROUP && tr_same_name(p->name, n, q->name))
            return tr_fail(err, size, "option table: --%s is declared twice", p->name);

    tr_value(p, text);
    if (p->type == TR_T_INT) ok = tr_in_range(p, (double)*(int *)p->to);
    if (p->type == TR_T_SIZE) ok = tr_in_range(p, (double)*(uint64_t *)p->to);
    if (p->type == TR_T_REAL) ok = isfinite(*(double *)p->to) && tr_in_range(p, *(double *)p->to);
    if (p->type == TR_T_CHOICE) ok = text[0] != 0;
    if (ok) return 1;
    return tr_fail(err, size, "option table: the default of --%s is out of range", p->name);
}

/* Parses one option of a preset without setting it. */
TR_DEF int tr_try_option(const tr_options *o, const char *word, char *err, size_t size) {
    union {
        int i;
        uint64_t u;
        double d;
        const char *s;
    } scratch;
    tr_opt row[2] = {TR_END, TR_END};
    tr_options only = *o;
    int no, ok;
    const size_t n = strcspn(word, "=");
    const tr_opt *p = tr_find_word(o, word, n, &no);
    if (p == NULL) return tr_unknown_option(o, word, n, err, size);
    memset(&scratch, 0, sizeof scratch);
    row[0] = *p;
    row[0].to = &scratch;
    row[0].own = NULL;
    row[0].from = TR_FROM_DEFAULT;
    only.opt = row;
    ok = tr_option(&only, word, NULL, TR_FROM_PRESET, err, size) != 0;
    free(row[0].own);
    return ok;
}

/* Checks the option table itself: no name occurs twice or is reserved, defaults are in
   range, the short help names options, and all presets can be parsed. tr_parse calls this
   first, so that a mistake in a table is found at the first start and not only when a
   preset is used. */
TR_DEF int tr_check_table(const tr_options *o, char *err, size_t size) {
    const tr_opt *p;
    const tr_preset *preset;
    char word[256], why[TR_ERR];
    const tr_basic *basic = o->brief != NULL ? o->brief->basic : NULL;
    for (p = o->opt; p->type != TR_T_END; p++)
        if (p->type != TR_T_GROUP && !tr_check_row(p, err, size)) return 0;
    for (; basic != NULL && basic->name != NULL; basic++)
        if (strcmp(basic->name, "preset") != 0
            && tr_find_exact(o, basic->name, strlen(basic->name)) == NULL)
            return tr_fail(err, size, "short help: there is no option --%s", basic->name);

    for (preset = o->preset; preset != NULL && preset->name != NULL; preset++) {
        const char *line = preset->set;
        int more;
        if (strlen(preset->name) >= sizeof o->preset_used)
            return tr_fail(err, size, "preset %.80s: the name is too long", preset->name);
        while ((more = tr_next_word(&line, word, sizeof word)) > 0)
            if (!tr_try_option(o, word, why, sizeof why))
                return tr_fail(err, size, "preset %s: %.900s", preset->name, why);
        if (more < 0)
            return tr_fail(err, size, "preset %s: expected words of at most %zu characters",
                           preset->name, sizeof word - 1);
    }
    return 1;
}
