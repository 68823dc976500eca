#pragma once
#include "base.h"
#include "buffer.h"
#include "json.h"
#include "options.h"
#include "options_values.h"
#include "options_set.h"


// >>options: checkpoints

/* Nonzero if this value, as written by tr_value, is a string in JSON. */
TR_DEF int tr_is_json_string(const tr_opt *p, const char *value) {
    if (p->type == TR_T_SET) return strcmp(value, "true") != 0 && strcmp(value, "false") != 0;
    return p->type == TR_T_TEXT || p->type == TR_T_CHOICE
           || (tr_accepts_number(p) && strcmp(value, "auto") == 0);
}

/* Appends the option's value as JSON. */
TR_DEF void tr_json_value(tr_buf *b, const tr_opt *p) {
    char value[64];
    tr_value(p, value);
    if (p->type == TR_T_TEXT) tr_json_string(b, *(const char **)p->to);
    else if (tr_is_json_string(p, value)) tr_json_string(b, value);
    else tr_buf_puts(b, value);
}

/* Returns one JSON object with the name of the preset and all options or, if kept is 1,
   only those that a checkpoint stores. The caller frees it. Returns NULL if memory runs
   out. */
TR_DEF char *tr_options_json(const tr_options *o, int kept) {
    tr_buf b;
    const tr_opt *p;
    memset(&b, 0, sizeof b);
    tr_buf_puts(&b, "{\"preset\":");
    tr_json_string(&b, o->preset_used[0] ? o->preset_used : NULL);
    for (p = o->opt; p->type != TR_T_END; p++) {
        if (p->type == TR_T_GROUP || (kept && p->keep == TR_LOCAL)) continue;
        tr_buf_puts(&b, ",");
        tr_json_string(&b, p->name);
        tr_buf_puts(&b, ":");
        tr_json_value(&b, p);
    }
    tr_buf_puts(&b, "}");
    if (b.oom) {
        tr_buf_free(&b);
        return NULL;
    }
    return b.s;
}

/* The results of tr_options_adopt: lists in text form, such as "--lr 0.03 (0.003),
   --steps 900 (800)". A list is empty if there is nothing to report. */
typedef struct {
    tr_buf changed;     /* TR_FREE options that were given and differ from the checkpoint,
                           each with the new value and, in parentheses, the checkpoint's
                           value */
    tr_buf json;        /* the same options in JSON form, with the checkpoint's value first:
                           {"lr":[0.003,0.03],..} */
    tr_buf given;       /* options that the checkpoint lacks and that were given */
    tr_buf missing;     /* options that the checkpoint lacks and that were not given:
                           training must not resume with their defaults */
} tr_adopted;

TR_DEF void tr_adopted_free(tr_adopted *a) {
    tr_buf_free(&a->changed);
    tr_buf_free(&a->json);
    tr_buf_free(&a->given);
    tr_buf_free(&a->missing);
}

/* Reads a TR_SET from a checkpoint that stores it as one flag per name, such as
   "literal-rows":true. Writes the names that are on, or "false", to `list`. Returns 1 on
   success, 0 if there is no such flag, or -1 if the checkpoint is malformed. */
TR_DEF int tr_find_flags(const tr_opt *p, const char *json, char *list, size_t size) {
    char key[160], text[16];
    const char *name;
    size_t len, at = 0;
    int k, found, some = 0, on;
    for (k = 0; (name = tr_choice(p->choices, k, &len)) != NULL; k++) {
        snprintf(key, sizeof key, "%.60s-%.*s", p->name, (int)len, name);
        found = tr_json_find(json, key, text, sizeof text);
        if (found < 0 || (found && !tr_read_flag(text, &on))) return -1;
        if (!found) continue;
        some = 1;
        if (on && at + len + 2 < size)
            at += (size_t)snprintf(list + at, size - at, "%s%.*s", at ? "," : "", (int)len, name);
    }
    if (some && !at) snprintf(list, size, "false");
    return some;
}

/* Nonzero if a TR_SET agrees with the checkpoint. If `all` is 0, bits that affect only
   training are not compared. */
TR_DEF int tr_set_agrees(const tr_opt *p, const char *saved, int all) {
    tr_nearest none = {NULL, 0, 0};
    int theirs, differ;
    if (!tr_read_set(p, saved, &theirs, &none)) return 0;
    differ = tr_set_bits(p, *(int *)p->to) ^ tr_set_bits(p, theirs);
    return (differ & ~(all ? 0 : p->open)) == 0;
}

/* Reports a value that differs from the checkpoint's and cannot be used. now and saved
   are NULL for a text option without a text. */
TR_DEF int tr_conflict(const tr_options *o, const tr_opt *p, const char *now, const char *saved,
                       int why_opened, char *err, size_t size) {
    int preset = p->from == TR_FROM_PRESET;
    return tr_fail(err, size,
                   "--%s is %.200s here (from %s%.80s) but %.200s in the checkpoint: leave %s out "
                   "to %s", p->name, now != NULL ? now : "none",
                   preset ? "--preset " : "the command line", preset ? o->preset_used : "",
                   saved != NULL ? saved : "none", preset ? "--preset" : "it",
                   why_opened == TR_INIT ? "start from its weights"
                                         : "resume that run, or name another checkpoint file");
}

/* Records that a TR_FREE option differs from the checkpoint. now and saved are NULL for
   a text option without a text. */
TR_DEF void tr_changed(const tr_opt *p, const char *now, const char *saved, tr_adopted *a) {
    tr_buf_printf(&a->changed, "%s--%s %s (%s)", a->changed.n ? ", " : "", p->name,
                  now != NULL ? now : "none", saved != NULL ? saved : "none");
    tr_buf_puts(&a->json, a->json.n ? "," : "{");
    tr_json_string(&a->json, p->name);
    tr_buf_puts(&a->json, ":[");
    if (saved == NULL || tr_is_json_string(p, saved)) tr_json_string(&a->json, saved);
    else tr_buf_puts(&a->json, saved);
    tr_buf_puts(&a->json, ",");
    tr_json_value(&a->json, p);
    tr_buf_puts(&a->json, "]");
}

/* Applies tr_options_adopt to one option. Returns 0 on error. */
TR_DEF int tr_adopt(const tr_options *o, tr_opt *p, const char *json, int why_opened,
                    tr_adopted *a, char *err, size_t size) {
    const int keep = p->keep & ~(TR_LATER | TR_KEPT), given = p->from >= TR_FROM_PRESET;
    char text[4096], value[64], why[TR_ERR];
    const char *saved = text, *now = value;
    int found;
    if (p->type == TR_T_GROUP || keep == TR_LOCAL) return 1;
    if (why_opened == TR_INIT && keep != TR_MODEL && !(p->keep & TR_KEPT)) return 1;

    found = tr_json_find(json, p->name, text, sizeof text);
    if (found == 0 && p->type == TR_T_SET) found = tr_find_flags(p, json, text, sizeof text);
    if (found < 0)
        return tr_fail(err, size, "the checkpoint's configuration is malformed: cannot read --%s",
                       p->name);
    if (found == 0) {
        tr_buf *list = given ? &a->given : &a->missing;
        if (keep != TR_HINT && !(p->keep & TR_LATER) && why_opened != TR_INIT)
            tr_buf_printf(list, "%s--%s", list->n ? ", " : "", p->name);
        return 1;
    }

    if (p->type == TR_T_TEXT && strcmp(text, "null") == 0) saved = NULL;
    if (!given && saved == NULL) {
        *(const char **)p->to = NULL;
        p->from = TR_FROM_CHECKPOINT;
        return 1;
    }
    if (!given) {
        if (tr_set(p, saved, TR_FROM_CHECKPOINT, why, sizeof why)) return 1;
        return tr_fail(err, size, "the checkpoint's configuration is invalid: %.900s", why);
    }

    /* accept a given value if it equals the checkpoint's or may differ from it */
    tr_value(p, value);
    if (p->type == TR_T_TEXT) now = *(const char **)p->to;
    if (now == NULL && saved == NULL) return 1;
    if (now != NULL && saved != NULL && strcmp(now, saved) == 0) return 1;
    if (p->type == TR_T_SET && tr_set_agrees(p, saved, why_opened == TR_RESUME)) return 1;
    if (keep == TR_HINT || (why_opened != TR_RESUME && keep != TR_MODEL)) return 1;
    if (keep != TR_FREE) return tr_conflict(o, p, now, saved, why_opened, err, size);
    tr_changed(p, now, saved, a);
    return 1;
}

/* Takes options from a checkpoint. json is the object written by tr_options_json;
   why_opened is TR_LOOK, TR_RESUME or TR_INIT. An option that is not TR_LOCAL takes the
   checkpoint's value, keeps the given value, or causes an error, depending on its
   class: see "Resuming" in the manual. An option that a preset sets counts as given. */
TR_DEF int tr_options_adopt(tr_options *o, const char *json, int why_opened, tr_adopted *a,
                            char *err, size_t size) {
    char preset[sizeof o->preset_used];
    tr_opt *p;
    int ok = 1;
    memset(a, 0, sizeof *a);
    for (p = o->opt; ok && p->type != TR_T_END; p++)
        ok = tr_adopt(o, p, json, why_opened, a, err, size);
    if (a->json.n) tr_buf_puts(&a->json, "}");
    if (ok && (a->changed.oom || a->json.oom || a->given.oom || a->missing.oom))
        ok = tr_fail(err, size, "out of memory: cannot read the checkpoint's options");
    if (!ok) {
        tr_adopted_free(a);
        return 0;
    }

    if (why_opened != TR_INIT && !o->preset_used[0]
        && tr_json_find(json, "preset", preset, sizeof preset) == 1
        && strcmp(preset, "null") != 0)
        strcpy(o->preset_used, preset);
    return 1;
}
