#pragma once
#include "api/config.h"
#include "api/context.h"
#include "api/files.h"
#include "api/lm.h"
#include "api/models.h"
#include "core/loops.h"
#include "core/platform.h"
#include "core/context.h"
#include "core/arena.h"
#include "core/text.h"
#include "core/tensors.h"
#include "io/header.h"
#include "io/reading.h"
#include "io/writer.h"
#include "io/checkpoint.h"
#include "create.h"


// >>models in files: values of fields

/* The version of the entries. If a field is added, increase it, and let stx_desc_read set
   the field to 0 in files of an older version. */
#define STX__MODEL_VERSION "1"

enum { STX__FIELD_KEY = 64, STX__REAL_TEXT = 40 }; /* capacities for "model.<field>" and a real */

static size_t stx__field_size(int kind) {
    switch (kind) {
    case STX_FIELD_INT: return sizeof(int);
    case STX_FIELD_UNSIGNED: return sizeof(unsigned);
    case STX_FIELD_INT32: return sizeof(int32_t);
    case STX_FIELD_REAL: return sizeof(double);
    case STX_FIELD_TEXT:
    case STX_FIELD_LIST:
    case STX_FIELD_CODE: return sizeof(void *);
    default: return sizeof(size_t);
    }
}

/* Returns 1 if all n bytes are 0, as in a number 0 and a NULL pointer. */
static int stx__all_zero(const char *p, size_t n) {
    while (n && !p[n - 1]) n--;
    return !n;
}

/* Writes v, a finite value, with the fewest digits that give v again, and with a point in
   every locale. */
static void stx__real_text(char t[STX__REAL_TEXT], double v) {
    int digits;
    char *p, *end;
    for (digits = 15; digits <= 17; digits++) {
        snprintf(t, STX__REAL_TEXT, "%.*g", digits, v);
        if (strtod(t, NULL) == v) break;
    }
    p = t + strspn(t, "+-0123456789");
    end = p + strcspn(p, "e0123456789");
    if (p == end) return;
    *p = '.';
    memmove(p + 1, end, strlen(end) + 1);
}

/* Parses a real at *s, with a point in every locale, and advances *s. */
static int stx__real_parse(const char **s, double *v) {
    char t[STX__REAL_TEXT], half[16], *end;
    const size_t n = strspn(*s, "+-.0123456789eE");
    size_t i, k = 0, point;
    snprintf(half, sizeof half, "%.1f", 0.5); /* "0", the locale's point, "5" */
    point = strlen(half) - 2;
    if (!n || n + sizeof half > sizeof t) return 0;
    for (i = 0; i < n; i++) {
        if ((*s)[i] != '.') {
            t[k++] = (*s)[i];
            continue;
        }
        if (k + point + n - i >= sizeof t) return 0;
        memcpy(t + k, half + 1, point);
        k += point;
    }
    t[k] = 0;
    *v = strtod(t, &end);
    *s += n;
    return !*end && stx__finite(*v);
}

/* Parses an integer at *s and advances *s. Returns 0 unless it is in the range of the
   kind. */
static int stx__integer_parse(const char **s, int kind, uint64_t *magnitude, int *negative) {
    const char *digits;
    uint64_t v = 0, most = SIZE_MAX - 1; /* SIZE_MAX is "none" */
    *negative = **s == '-' && (kind == STX_FIELD_INT || kind == STX_FIELD_INT32);
    *s += *negative;
    if (kind == STX_FIELD_INT) most = INT_MAX;
    if (kind == STX_FIELD_INT32) most = INT32_MAX;
    if (kind == STX_FIELD_UNSIGNED) most = UINT_MAX;
    for (digits = *s; **s >= '0' && **s <= '9'; (*s)++) {
        const unsigned digit = (unsigned)(**s - '0');
        if (v > (most - digit) / 10) return 0;
        v = 10 * v + digit;
    }
    *magnitude = v;
    return *s > digits;
}

/* Parses a number at *s, stores it at `to` and advances *s. */
static int stx__number_parse(const char **s, int kind, void *to) {
    uint64_t v;
    int negative;
    if (kind == STX_FIELD_REAL) return stx__real_parse(s, (double *)to);
    if (kind != STX_FIELD_INT && kind != STX_FIELD_INT32 && kind != STX_FIELD_UNSIGNED
        && !strncmp(*s, "none", 4)) {
        *s += 4;
        *(size_t *)to = SIZE_MAX;
        return 1;
    }
    if (!stx__integer_parse(s, kind, &v, &negative)) return 0;
    if (kind == STX_FIELD_INT)
        *(int *)to = negative ? -(int)v : (int)v;
    else if (kind == STX_FIELD_INT32)
        *(int32_t *)to = negative ? -(int32_t)v : (int32_t)v;
    else if (kind == STX_FIELD_UNSIGNED)
        *(unsigned *)to = (unsigned)v;
    else
        *(size_t *)to = (size_t)v;
    return 1;
}

/* Parses up to n values, separated by commas, into the array `to`. Returns how many there
   are, or 0 if the text is malformed or has more. */
static size_t stx__numbers_parse(const char *s, int kind, size_t n, void *to) {
    char *p = (char *)to;
    size_t i;
    for (i = 0; i < n; i++) {
        if (!stx__number_parse(&s, kind, p + i * stx__field_size(kind))) return 0;
        if (!*s) return i + 1;
        if (*s++ != ',') return 0;
    }
    return 0;
}

/* Appends the n values at `from`, separated by commas. Returns 0 if one is not finite. */
static int stx__numbers_add(stx__text *t, int kind, size_t n, const void *from) {
    const char *p = (const char *)from;
    char b[STX__REAL_TEXT];
    size_t i;
    for (i = 0; i < n; i++, p += stx__field_size(kind)) {
        if (kind == STX_FIELD_REAL) {
            const double v = *(const double *)(const void *)p;
            if (!stx__finite(v)) return 0;
            stx__real_text(b, v);
        } else if (kind == STX_FIELD_INT) {
            snprintf(b, sizeof b, "%d", *(const int *)(const void *)p);
        } else if (kind == STX_FIELD_INT32) {
            snprintf(b, sizeof b, "%ld", (long)*(const int32_t *)(const void *)p);
        } else if (kind == STX_FIELD_UNSIGNED) {
            snprintf(b, sizeof b, "%u", *(const unsigned *)(const void *)p);
        } else {
            const size_t v = *(const size_t *)(const void *)p;
            snprintf(b, sizeof b, v == SIZE_MAX ? "none" : "%zu", v);
        }
        if (i) stx__text_add_str(t, ",");
        stx__text_add_str(t, b);
    }
    return 1;
}


// >>models in files

/* Adds a field of `desc` to a file. */
static int stx__field_write(stx_writer *w, const stx_family *family, const stx_field *p,
                            const char *desc, stx__text *t) {
    const char *at = desc + p->offset;
    const size_t each = stx__field_size(p->kind);
    char key[STX__FIELD_KEY];
    size_t n = p->count;
    int finite = 1;
    if (p->kind == STX_FIELD_SETTING) return 1;
    if (p->kind == STX_FIELD_CODE) {
        if (stx__all_zero(at, each)) return 1;
        stx_fail(w->x, STX_ERR_ARG,
                 "a model of the family \"%s\" with `%s` set cannot be described in a file: save "
                 "its parameters with stx_params_save", family->name, p->name);
        return 0;
    }
    t->n = 0;
    if (p->kind == STX_FIELD_TEXT) {
        const char *s = *(const char *const *)(const void *)at;
        stx__text_add_str(t, s ? s : "");
    } else if (p->kind == STX_FIELD_LIST) {
        const size_t *list = *(const size_t *const *)(const void *)at;
        n = list ? *(const size_t *)(const void *)(desc + p->length) : 0;
        stx__numbers_add(t, STX_FIELD_SIZE, n, list);
    } else {
        while (n > 1 && stx__all_zero(at + (n - 1) * each, each)) n--;
        finite = stx__numbers_add(t, p->kind, n, at);
    }
    stx__text_add(t, "", 1);
    if (!finite) {
        stx_fail(w->x, STX_ERR_ARG, "%s of a model of the family \"%s\": expected a finite value",
                 p->name, family->name);
        return 0;
    }
    if (t->bad) {
        stx_fail(w->x, STX_ERR_MEMORY, "out of memory: cannot write a desc");
        return 0;
    }
    snprintf(key, sizeof key, "model.%.40s", p->name);
    return stx_writer_meta(w, key, t->s);
}

STX_DEF int stx_desc_write(stx_writer *w, const stx_family *family, const void *desc) {
    STX__FP_SCOPE;
    stx__text t;
    size_t i;
    int ok;
    if (!w || !family || !desc || !stx_ok(w->x)) return 0;
    memset(&t, 0, sizeof t);
    t.x = w->x;
    ok = stx_writer_meta(w, "model.family", family->name)
         && stx_writer_meta(w, "model.version", STX__MODEL_VERSION);
    for (i = 0; ok && i < family->fields; i++)
        ok = stx__field_write(w, family, &family->field[i], (const char *)desc, &t);
    stx_block_free(w->x, t.s);
    w->failed |= !ok; /* nothing is written */
    return ok;
}

/* Sets an error and returns 0 unless the file describes a model of this family. */
static int stx__model_check(stx_ctx *x, const stx_family *family, const stx_file *f) {
    const char *name = stx_file_meta(f, "model.family"), *format = stx_file_meta(f, "format");
    const char *version = stx_file_meta(f, "model.version");
    char q[STX_QUOTE];
    if (!name && format && !strncmp(format, "seqtx.", 6)) {
        stx_quote(q, format + 6, strcspn(format + 6, "."));
        stx_fail(x, STX_ERR_FORMAT,
                 "%s: this checkpoint does not describe its model, because an older trainer or "
                 "convert.py wrote it: train_%s --checkpoint OLD --no-train --export NEW writes "
                 "a file that does", f->path, q);
        return 0;
    }
    if (!name) {
        stx_fail(x, STX_ERR_FORMAT,
                 "%s: metadata \"model.family\": expected \"%s\", got nothing: give a file of "
                 "stx_model_save, or a trainer's checkpoint", f->path, family->name);
        return 0;
    }
    if (!version || strcmp(version, STX__MODEL_VERSION)) {
        stx_fail(x, STX_ERR_FORMAT,
                 "%s: metadata \"model.version\": expected \"%s\", got \"%s\": a newer version of "
                 "seqtx wrote the file, or it is damaged: update seqtx, or use another copy",
                 f->path, STX__MODEL_VERSION,
                 version ? stx_quote(q, version, strlen(version)) : "");
        return 0;
    }
    if (!strcmp(name, family->name)) return 1;
    stx_fail(x, STX_ERR_FORMAT,
             "%s: metadata \"model.family\": expected \"%s\", got \"%s\": open the file with the "
             "functions of that family's header", f->path, family->name,
             stx_quote(q, name, strlen(name)));
    return 0;
}

/* Sets an error and returns 0 if the file describes a field that the family lacks. */
static int stx__model_known(stx_ctx *x, const stx_family *family, const stx_file *f) {
    char q[STX_QUOTE];
    size_t i, k;
    for (i = 0; i < f->nmeta; i++) {
        const char *key = f->meta[i].key;
        if (strncmp(key, "model.", 6)) continue;
        if (!strcmp(key, "model.family") || !strcmp(key, "model.version")) continue;
        for (k = 0; k < family->fields && strcmp(key + 6, family->field[k].name); k++) {}
        if (k < family->fields) continue;
        stx_fail(x, STX_ERR_FORMAT,
                 "%s: metadata \"%s\": a model of the family \"%s\" has no such field: the file is "
                 "damaged, or a newer version of seqtx wrote it", f->path,
                 stx_quote(q, key, strlen(key)), family->name);
        return 0;
    }
    return 1;
}

/* Parses the value of a field and stores it in `desc`. Returns 0 if the value is
   malformed or memory runs out. */
static int stx__field_parse(stx_ctx *x, const stx_field *p, const char *value, char *desc) {
    char *at = desc + p->offset, *copy;
    size_t *list, n;
    if (p->kind == STX_FIELD_TEXT) {
        copy = *value ? (char *)stx_persist(x, strlen(value) + 1) : NULL;
        if (copy) strcpy(copy, value);
        *(const char **)(void *)at = copy;
        return copy || !*value;
    }
    if (p->kind != STX_FIELD_LIST) return stx__numbers_parse(value, p->kind, p->count, at) > 0;
    if (!*value) return 1;
    n = *(const size_t *)(const void *)(desc + p->length);
    if (!n || n > strlen(value)) return 0; /* before the list is allocated */
    list = (size_t *)stx_persist(x, n * sizeof *list);
    *(const size_t **)(void *)at = list;
    return list && stx__numbers_parse(value, STX_FIELD_SIZE, n, list) == n;
}

static int stx__field_read(stx_ctx *x, const stx_file *f, const stx_field *p, char *desc) {
    static const char *const expected[] = {
        "", "an integer of 0 or more", "an integer", "an integer of 0 or more", "an integer",
        "a finite number", "text", "integers of 0 or more"
    };
    char key[STX__FIELD_KEY], q[STX_QUOTE], number[48] = "";
    const char *value;
    if (p->kind == STX_FIELD_SETTING || p->kind == STX_FIELD_CODE) return 1;
    snprintf(key, sizeof key, "model.%.40s", p->name);
    value = stx_file_meta(f, key);
    if (value && stx__field_parse(x, p, value, desc)) return 1;
    strcpy(q, "nothing");
    if (value) stx_quote(q, value, strlen(value));
    if (p->count > 1) snprintf(number, sizeof number, "up to %zu times ", p->count);
    if (p->kind == STX_FIELD_LIST)
        snprintf(number, sizeof number, "%zu ", *(const size_t *)(const void *)(desc + p->length));
    stx_fail(x, STX_ERR_FORMAT,
             "%s: metadata \"%s\": expected %s%s, got %s%s%s: the file is damaged; use another "
             "copy", f->path, key, number, expected[p->kind], value ? "\"" : "", q,
             value ? "\"" : "");
    return 0;
}

STX_DEF int stx_desc_read(stx_ctx *x, const stx_family *family, const stx_file *f, void *desc) {
    STX__FP_SCOPE;
    size_t i;
    if (!stx_ok(x)) return 0;
    if (!family || !f || !desc) {
        stx_fail(x, STX_ERR_ARG, "stx_desc_read: expected a family, a file and a desc, got NULL");
        return 0;
    }
    memset(desc, 0, family->desc_size);
    if (!stx__model_check(x, family, f) || !stx__model_known(x, family, f)) return 0;
    for (i = 0; i < family->fields; i++)
        if (!stx__field_read(x, f, &family->field[i], (char *)desc)) return 0;
    return 1;
}

/* Checks that the file has the tensors of a model, in its shapes. */
static int stx__model_tensors(stx_ctx *x, const stx_family *family, void *model,
                              const stx_file *f) {
    const stx_params *p;
    char expected[96], got[96];
    size_t i;
    int k;
    for (k = 0; (p = family->params(model, k)) != NULL; k++)
        for (i = 0; i < p->count; i++) {
            const stx_entry *e = stx_file_find(f, p->name[i]);
            if (e && !stx__entry_readable(e)) return 0;
            if (e && stx__fits_shape(e, p->tensor[i], 0) && stx__is_param(e->dtype)) continue;
            stx_fail(x, STX_ERR_FORMAT,
                     "%s: tensor \"%s\": expected shape %s, which the metadata \"model.*\" "
                     "describes, and dtype F32, F64, F16 or BF16, got %s of shape %s: the file is "
                     "damaged; use another copy",
                     f->path, p->name[i], stx__shape(p->tensor[i], expected),
                     e ? e->kind : "no tensor", e ? stx__dims(e->dim, e->ndim, got) : "()");
            return 0;
        }
    return 1;
}

/* Sets x's error to that of `from`, which can be x itself. Adds the path of the file and
   `what` to it, unless it begins with the path. */
static void stx__model_error(stx_ctx *x, const stx_ctx *from, const stx_file *f,
                             const char *what) {
    char text[sizeof x->error.text];
    int code = from->error.code;
    if (code == STX_ERR_ARG || code == STX_ERR_SHAPE) code = STX_ERR_FORMAT;
    memcpy(text, from->error.text, sizeof text);
    if (x == from) x->error.code = STX_OK;
    if (strncmp(text, f->path, strlen(f->path)))
        stx_fail(x, code, "%s: %s%s", f->path, what, text);
    else
        stx_fail(x, code, "%s", text);
}

/* Returns 1 if the file describes a valid model and has all of its tensors. Creates the
   model in a dry context, which allocates nothing in x, reads no random numbers and
   finds all errors. */
static int stx__model_fits(stx_ctx *x, const stx_family *family, const stx_file *f) {
    stx_desc d;
    stx_ctx *dry;
    void *desc, *model = NULL;
    memset(&d, 0, sizeof d);
    d.dry = 1;
    d.threads = 1;
    if (!stx__on_gpu(x)) d.max_bytes = x->desc.max_bytes; /* a damaged size fails early */
    dry = stx_create(&d);
    desc = stx_persist(dry, family->desc_size);
    if (desc && stx_desc_read(dry, family, f, desc)) model = family->create(dry, desc);
    if (model && !stx__model_tensors(dry, family, model, f)) model = NULL;
    if (!dry) stx_fail(x, STX_ERR_MEMORY, "out of memory: cannot open %s", f->path);
    if (dry && !stx_ok(dry)) stx__model_error(x, dry, f, "the model that it describes: ");
    stx_destroy(dry);
    return model != NULL;
}

STX_DEF void *stx_model_read(stx_ctx *x, const stx_family *family, const stx_file *f) {
    stx_params *p;
    void *desc, *model = NULL;
    int k;
    if (!stx_ok(x)) return NULL;
    if (!family || !f || f->x != x) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_model_read: expected a family and a file that is open in the same context");
        return NULL;
    }
    if (stx_file_meta(f, "seal") && !stx_file_verify(f)) {
        stx__model_error(x, x, f, "");
        return NULL;
    }
    if (!stx__model_fits(x, family, f)) return NULL;

    desc = stx_persist(x, family->desc_size);
    if (desc && stx_desc_read(x, family, f, desc)) model = family->create(x, desc);
    for (k = 0; model && (p = family->params(model, k)) != NULL; k++)
        stx_params_load(p, f, "");
    if (stx_ok(x)) return model;
    stx__model_error(x, x, f, "");
    return NULL;
}

STX_DEF void *stx_model_open(stx_ctx *x, const stx_family *family, const char *path) {
    stx_file *f = stx_file_open(x, path);
    void *model = f ? stx_model_read(x, family, f) : NULL;
    stx_file_close(f);
    return model;
}

STX_DEF int stx_model_write(stx_writer *w, const stx_family *family, void *model) {
    const stx_params *p;
    int k;
    if (!w || !family || !model) return 0;
    if (!stx_desc_write(w, family, family->desc(model))) return 0;
    for (k = 0; (p = family->params(model, k)) != NULL; k++)
        if (!stx_params_save(w, p, "")) return 0;
    return 1;
}

STX_DEF int stx_model_save(const stx_family *family, void *model, const char *path) {
    stx_writer *w;
    if (!family || !model) return 0;
    w = stx_writer_create(family->params(model, 0)->ctx);
    stx_model_write(w, family, model);
    stx_writer_checksum(w);
    return stx_writer_finish(w, path); /* writes nothing if a call above failed */
}

STX_DEF stx_lm stx_lm_open(stx_ctx *x, const char *path, const stx_family *const *family,
                           size_t n) {
    stx_file *f = family && n ? stx_file_open(x, path) : NULL;
    const char *name = stx_file_meta(f, "model.family");
    char q[STX_QUOTE];
    void *model = NULL;
    stx_lm lm;
    size_t i = 0;
    memset(&lm, 0, sizeof lm);
    while (name && i < n && strcmp(name, family[i]->name)) i++;
    if (f && i < n)
        model = stx_model_read(x, family[i], f); /* without a name, sets the error */
    else if (f)
        stx_fail(x, STX_ERR_FORMAT,
                 "%s: metadata \"model.family\": expected a family in the list of stx_lm_open, got "
                 "\"%s\": include that family's header and add it to the list", path,
                 stx_quote(q, name, strlen(name)));
    if (model) lm = family[i]->as_lm(model);
    if (model && !lm.model)
        stx_fail(x, STX_ERR_ARG,
                 "%s: the model has no vocabulary, so it is not a language model: open it with the "
                 "function of its family", path);
    stx_file_close(f);
    return lm;
}
