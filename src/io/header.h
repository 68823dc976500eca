#pragma once
#include "../api/context.h"
#include "../api/files.h"
#include "../core/platform.h"
#include "../core/text.h"
#include "map.h"


// >>files: header

typedef struct stx__pair {
    const char *key, *value;
} stx__pair;

struct stx_file {
    stx_ctx *x;
    stx_map map;
    int in_memory;              /* 1: the map refers to the caller's memory */
    char *path;
    char *pool;                 /* all strings of the header, decoded */
    stx_entry *entry;           /* (count), in the order of the header */
    const stx_entry **by_name;  /* (count), sorted by name */
    stx__pair *meta;            /* (nmeta), sorted by key */
    size_t count, cap, nmeta, capmeta;
};

/* State of the header parser. */
typedef struct stx__json {
    stx_ctx *x;
    const char *path;
    const unsigned char *s; /* (n): the header; s[i] is the next byte to parse */
    size_t n, i;
    char *pool;             /* (n): the decoded strings. A decoded string and its
                               terminator take no more space than its quoted form in the
                               header */
    size_t used;            /* bytes of the pool in use */
} stx__json;

/* Sets the error for a malformed header and returns 0. */
static int stx__json_fail(stx__json *j, const char *expected) {
    char q[STX_QUOTE];
    size_t left = j->n - j->i;
    if (!left)
        stx_fail(j->x, STX_ERR_FORMAT,
                 "%s is damaged or not a safetensors file: expected %s, but its header ends after "
                 "%zu bytes", j->path, expected, j->n);
    else
        stx_fail(j->x, STX_ERR_FORMAT,
                 "%s is damaged or not a safetensors file: expected %s, got '%s' at byte %zu of "
                 "its header", j->path, expected, stx_quote(q, j->s + j->i, left < 12 ? left : 12),
                 j->i);
    return 0;
}

/* Skips white space and returns the next byte without consuming it. At the end of the
   header, returns 0, which is never a valid byte here. */
static int stx__json_peek(stx__json *j) {
    while (j->i < j->n) {
        int c = j->s[j->i];
        if (c != ' ' && c != '\n' && c != '\t' && c != '\r') return c;
        j->i++;
    }
    return 0;
}

static int stx__json_take(stx__json *j, char c) {
    char expected[4];
    if (stx__json_peek(j) == c) {
        j->i++;
        return 1;
    }
    expected[0] = expected[2] = '\'';
    expected[1] = c;
    expected[3] = 0;
    return stx__json_fail(j, expected);
}

/* Advances to the next member of an object or array. Returns 1 if there is one, 0
   after the closing bracket, -1 after an error. */
static int stx__json_next(stx__json *j, int *first, char close) {
    if (stx__json_peek(j) == close) {
        j->i++;
        return 0;
    }
    if (!*first && !stx__json_take(j, ',')) return -1;
    *first = 0;
    return 1;
}

static int stx__json_hex4(stx__json *j, uint32_t *v) {
    int k;
    *v = 0;
    for (k = 0; k < 4; k++, j->i++) {
        unsigned c = j->i < j->n ? j->s[j->i] : 0;
        if (c >= '0' && c <= '9')
            c -= '0';
        else if (c >= 'a' && c <= 'f')
            c -= 'a' - 10;
        else if (c >= 'A' && c <= 'F')
            c -= 'A' - 10;
        else
            return stx__json_fail(j, "four hexadecimal digits");
        *v = *v << 4 | c;
    }
    return 1;
}

/* Decodes \uXXXX, or a surrogate pair \uXXXX\uXXXX, into *c; on entry, j->i is just
   after the first u. Rejects code point 0, because strings are zero-terminated. */
static int stx__json_unicode(stx__json *j, uint32_t *c) {
    uint32_t low;
    if (!stx__json_hex4(j, c)) return 0;
    if (*c >= 0xD800 && *c < 0xDC00 && j->n - j->i >= 2 && j->s[j->i] == '\\'
        && j->s[j->i + 1] == 'u') {
        j->i += 2;
        if (!stx__json_hex4(j, &low)) return 0;
        if (low < 0xDC00 || low > 0xDFFF)
            return stx__json_fail(j, "a complete surrogate pair just before this point");
        *c = 0x10000 + ((*c - 0xD800) << 10) + (low - 0xDC00);
    }
    if (*c == 0 || (*c >= 0xD800 && *c <= 0xDFFF))
        return stx__json_fail(j, "a Unicode character just before this point");
    return 1;
}

/* Decodes an escape sequence to o; on entry, j->i is just after the backslash. Returns
   the number of bytes written, or 0 after an error. */
static size_t stx__json_escape(stx__json *j, char *o) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    uint32_t c = j->i < j->n ? j->s[j->i] : 0;
    const char *e = c ? strchr(from, (int)c) : NULL;
    if (c == 'u') {
        j->i++;
        return stx__json_unicode(j, &c) ? stx__utf8_put(o, c) : 0;
    }
    if (!e) {
        stx__json_fail(j, "one of \" \\ / b f n r t u after a backslash");
        return 0;
    }
    *o = to[e - from];
    j->i++;
    return 1;
}

/* Decodes a string into the pool and zero-terminates it. Returns NULL after an error. */
static const char *stx__json_string(stx__json *j) {
    char *o = j->pool + j->used, *start = o;
    uint32_t c;
    size_t k;
    if (stx__json_peek(j) != '"') {
        stx__json_fail(j, "a string");
        return NULL;
    }
    for (++j->i; j->i < j->n && j->s[j->i] != '"'; o += k) {
        if (j->s[j->i] == '\\') {
            j->i++;
            k = stx__json_escape(j, o);
            if (!k) return NULL;
            continue;
        }
        k = j->s[j->i] < 0x20 ? 0 : stx_utf8(j->s + j->i, j->n - j->i, &c);
        if (!k) {
            stx__json_fail(j, "UTF-8 text without control characters");
            return NULL;
        }
        memcpy(o, j->s + j->i, k);
        j->i += k;
    }
    if (j->i == j->n) {
        stx__json_fail(j, "the closing quote of a string");
        return NULL;
    }
    j->i++;
    *o++ = 0;
    j->used = (size_t)(o - j->pool);
    return start;
}

/* Reads a non-negative integer that fits in a size_t and has no sign, fraction, exponent
   or leading zeros. */
static int stx__json_size(stx__json *j, size_t *v) {
    int c = stx__json_peek(j);
    if (c < '0' || c > '9') return stx__json_fail(j, "a non-negative integer");
    *v = 0;
    if (c == '0') {
        j->i++;
        return 1;
    }
    for (; j->i < j->n && j->s[j->i] >= '0' && j->s[j->i] <= '9'; j->i++) {
        size_t d = (size_t)(j->s[j->i] - '0');
        if (*v > (SIZE_MAX - d) / 10) return stx__json_fail(j, "an integer that fits in a size_t");
        *v = *v * 10 + d;
    }
    return 1;
}

/* Reads the value of "__metadata__", an object whose values are strings. */
static int stx__file_metadata(stx_file *f, stx__json *j) {
    int first = 1, r;
    if (!stx__json_take(j, '{')) return 0;
    while ((r = stx__json_next(j, &first, '}')) > 0) {
        stx__pair *p = (stx__pair *)stx__grow(f->x, f->meta, f->nmeta, &f->capmeta, sizeof *p);
        if (!p) return 0;
        f->meta = p;
        p += f->nmeta;
        p->key = stx__json_string(j);
        if (!p->key || !stx__json_take(j, ':')) return 0;
        p->value = stx__json_string(j);
        if (!p->value) return 0;
        f->nmeta++;
    }
    return r == 0;
}

enum { STX__BITS_MOST = 128 };  /* largest accepted element of an unknown type */

static int stx__file_overflow(stx_file *f, const stx_entry *e) {
    char q[STX_QUOTE];
    stx_fail(f->x, STX_ERR_FORMAT, "%s is damaged: the size of \"%s\" overflows size_t", f->path,
             stx_quote(q, e->name, strlen(e->name)));
    return 0;
}

/* Reads the shape of a tensor into e->dims, e->dim and e->count. *most receives the
   largest product of leading dimensions, which exceeds e->count if a later dimension is
   0. */
static int stx__file_shape(stx_file *f, stx__json *j, stx_entry *e, size_t *most) {
    int first = 1, r;
    size_t d;
    if (!stx__json_take(j, '[')) return 0;
    while ((r = stx__json_next(j, &first, ']')) > 0) {
        if (!stx__json_size(j, &d)) return 0;
        if (d && e->count > SIZE_MAX / d) return stx__file_overflow(f, e);
        e->count *= d;
        *most = STX_MAX(*most, e->count);
        if (e->dims < STX_ENTRY_DIM) e->dim[e->dims] = d;
        e->dims++;
    }
    return r == 0;
}

/* Sets the type, size and data of e and checks that they are consistent. The data is the
   range [begin, end) of the `size` bytes at base. */
static int stx__file_place(stx_file *f, stx_entry *e, size_t most, size_t begin, size_t end,
                           const unsigned char *base, size_t size) {
    char q[STX_QUOTE];
    size_t bits, bytes, given = end - begin;
    int k = 0;
    while (k < STX__DTYPES_KNOWN && strcmp(e->kind, stx__dtype[k].name)) k++;
    bits = k < STX__DTYPES_KNOWN ? stx__dtype[k].bits : 0;
    if (most / 8 >= SIZE_MAX / (bits ? bits : (size_t)STX__BITS_MOST))
        return stx__file_overflow(f, e);
    bytes = e->count / 8 * bits + (e->count % 8 * bits + 7) / 8;
    e->ndim = (int)e->dims;
    e->dtype = k < STX__DTYPES ? k : STX_OTHER;
    if (e->dims > STX_ENTRY_DIM) {
        e->ndim = 0;
        e->dtype = STX_OTHER;
        memset(e->dim, 0, sizeof e->dim);
    }

    stx_quote(q, e->name, strlen(e->name));
    if (begin > end || end > size) {
        stx_fail(f->x, STX_ERR_FORMAT,
                 "%s is damaged or truncated: the data of \"%s\" should occupy bytes %zu to %zu, "
                 "but the file has %zu bytes of data", f->path, q, begin, end, size);
        return 0;
    }
    if (bits && given != bytes) {
        stx_fail(f->x, STX_ERR_FORMAT,
                 "%s is damaged: the shape of \"%s\" requires %zu bytes, but its data_offsets "
                 "give %zu", f->path, q, bytes, given);
        return 0;
    }
    if (e->count % 8 * bits % 8) {
        stx_fail(f->x, STX_ERR_FORMAT,
                 "%s is damaged: \"%s\" has %zu elements of %zu bits, which do not fill whole "
                 "bytes", f->path, q, e->count, bits);
        return 0;
    }
    /* an element of an unknown type is assumed to have from 1 to STX__BITS_MOST bits */
    if (!bits && (!e->count != !given || e->count / 8 > given
                  || given / (STX__BITS_MOST / 8) > e->count)) {
        stx_fail(f->x, STX_ERR_FORMAT,
                 "%s is damaged: \"%s\" has %zu elements, but its data_offsets give %zu bytes",
                 f->path, q, e->count, given);
        return 0;
    }
    e->bytes = given;
    e->data = base + begin;
    return 1;
}

/* Reads the description of a tensor, an object whose members are exactly dtype, shape
   and data_offsets. */
static int stx__file_tensor(stx_file *f, stx__json *j, stx_entry *e, const unsigned char *base,
                            size_t size) {
    enum { DTYPE = 1, SHAPE = 2, OFFSETS = 4 };

    int first = 1, r, have = 0;
    size_t begin = 0, end = 0, most = 1;
    e->count = 1;
    if (!stx__json_take(j, '{')) return 0;
    while ((r = stx__json_next(j, &first, '}')) > 0) {
        const char *key = stx__json_string(j);
        int field = 0;
        if (!key || !stx__json_take(j, ':')) return 0;
        if (!strcmp(key, "dtype")) field = DTYPE;
        if (!strcmp(key, "shape")) field = SHAPE;
        if (!strcmp(key, "data_offsets")) field = OFFSETS;
        if (!field || (have & field))
            return stx__json_fail(j, "dtype, shape or data_offsets, each once, before this point");
        have |= field;
        if (field == DTYPE) {
            e->kind = stx__json_string(j);
            if (!e->kind) return 0;
        } else if (field == SHAPE) {
            if (!stx__file_shape(f, j, e, &most)) return 0;
        } else {
            if (!stx__json_take(j, '[') || !stx__json_size(j, &begin) || !stx__json_take(j, ',')
                || !stx__json_size(j, &end) || !stx__json_take(j, ']'))
                return 0;
        }
    }
    if (r < 0) return 0;
    if (have != (DTYPE | SHAPE | OFFSETS))
        return stx__json_fail(j, "an object with dtype, shape and data_offsets before this point");
    return stx__file_place(f, e, most, begin, end, base, size);
}

static int stx__compare_keys(const void *a, const void *b) {
    return strcmp(((const stx__pair *)a)->key, ((const stx__pair *)b)->key);
}

static int stx__compare_names(const void *a, const void *b) {
    return strcmp((*(const stx_entry *const *)a)->name, (*(const stx_entry *const *)b)->name);
}

static int stx__compare_data(const void *a, const void *b) {
    const stx_entry *p = *(const stx_entry *const *)a, *q = *(const stx_entry *const *)b;
    uintptr_t i = (uintptr_t)p->data, k = (uintptr_t)q->data;
    if (i != k) return i < k ? -1 : 1;
    return (p->bytes > q->bytes) - (p->bytes < q->bytes);
}

/* Checks the length of the header and initialises the parser with the header. */
static int stx__file_begin(stx_file *f, stx__json *j) {
    const unsigned char *s = f->map.data;
    uint64_t len = 0;
    int k;
    if (f->map.size < 8) {
        stx_fail(f->x, STX_ERR_FORMAT,
                 "%s is truncated or not a safetensors file: expected at least 10 bytes, got %zu",
                 f->path, f->map.size);
        return 0;
    }
    for (k = 7; k >= 0; --k) len = len << 8 | s[k];
    if (len > STX__HEADER_MAX || len > f->map.size - 8) {
        stx_fail(f->x, STX_ERR_FORMAT,
                 "%s is truncated or not a safetensors file: its first 8 bytes specify a header "
                 "of %llu bytes, but the file has %zu bytes, and the limit for a header is %u",
                 f->path, (unsigned long long)len, f->map.size, STX__HEADER_MAX);
        return 0;
    }
    memset(j, 0, sizeof *j);
    j->x = f->x;
    j->path = f->path;
    j->s = s + 8;
    j->n = (size_t)len;
    if (!j->n || j->s[0] != '{') return stx__json_fail(j, "'{'");
    j->i = 1;
    j->pool = f->pool = (char *)stx_block(f->x, j->n);
    return j->pool != NULL;
}

/* Reads all members of the header. The tensor data is the `size` bytes at base. */
static int stx__file_members(stx_file *f, stx__json *j, const unsigned char *base, size_t size) {
    int first = 1, r, seen = 0;
    while ((r = stx__json_next(j, &first, '}')) > 0) {
        const char *name = stx__json_string(j);
        stx_entry *e;
        if (!name || !stx__json_take(j, ':')) return 0;
        if (!strcmp(name, "__metadata__")) {
            if (seen++) return stx__json_fail(j, "only one __metadata__ before this point");
            if (!stx__file_metadata(f, j)) return 0;
            continue;
        }
        e = (stx_entry *)stx__grow(f->x, f->entry, f->count, &f->cap, sizeof *e);
        if (!e) return 0;
        f->entry = e;
        e += f->count;
        memset(e, 0, sizeof *e);
        e->name = name;
        e->file = f;
        if (!stx__file_tensor(f, j, e, base, size)) return 0;
        f->count++;
    }
    if (r < 0) return 0;
    if (stx__json_peek(j) || j->i < j->n) return stx__json_fail(j, "only white space");
    return 1;
}

/* Checks that the tensors tile the `size` bytes of data at base. Leaves by_name sorted by
   position instead of name. */
static int stx__file_tiled(stx_file *f, const unsigned char *base, size_t size) {
    char q[STX_QUOTE];
    size_t i, at = 0;
    qsort(f->by_name, f->count, sizeof *f->by_name, stx__compare_data);
    for (i = 0; i < f->count; i++) {
        const stx_entry *e = f->by_name[i];
        size_t begin = (size_t)((const unsigned char *)e->data - base);
        if (begin != at) {
            stx_fail(f->x, STX_ERR_FORMAT,
                     "%s is damaged: the data of \"%s\" starts at byte %zu, %s at byte %zu",
                     f->path, stx_quote(q, e->name, strlen(e->name)), begin,
                     begin < at ? "inside another tensor, which ends"
                                : "after a gap: the preceding data ends",
                     at);
            return 0;
        }
        at = begin + e->bytes;
    }
    if (at == size) return 1;
    stx_fail(f->x, STX_ERR_FORMAT,
             "%s is damaged: it has %zu bytes of data, but its header describes %zu", f->path, size,
             at);
    return 0;
}

/* Sorts the tensors by name and the metadata by key, and checks that names and keys are
   unique. */
static int stx__file_sort(stx_file *f) {
    char q[STX_QUOTE];
    size_t i;
    qsort(f->by_name, f->count, sizeof *f->by_name, stx__compare_names);
    if (f->nmeta) qsort(f->meta, f->nmeta, sizeof *f->meta, stx__compare_keys);
    for (i = 1; i < f->count; i++) {
        const char *name = f->by_name[i]->name;
        if (strcmp(f->by_name[i - 1]->name, name)) continue;
        stx_fail(f->x, STX_ERR_FORMAT, "%s is damaged: it has two tensors named \"%s\"", f->path,
                 stx_quote(q, name, strlen(name)));
        return 0;
    }
    for (i = 1; i < f->nmeta; i++) {
        const char *key = f->meta[i].key;
        if (strcmp(f->meta[i - 1].key, key)) continue;
        stx_fail(f->x, STX_ERR_FORMAT, "%s is damaged: its metadata has two values for \"%s\"",
                 f->path, stx_quote(q, key, strlen(key)));
        return 0;
    }
    return 1;
}

static int stx__file_parse(stx_file *f) {
    const unsigned char *base;
    size_t size, i;
    stx__json j;
    if (!stx__file_begin(f, &j)) return 0;
    base = j.s + j.n;
    size = f->map.size - 8 - j.n;
    if (!stx__file_members(f, &j, base, size)) return 0;

    f->by_name = (const stx_entry **)stx_block(f->x, (f->count + 1) * sizeof *f->by_name);
    if (!f->by_name) return 0;
    for (i = 0; i < f->count; i++) f->by_name[i] = &f->entry[i];
    return stx__file_tiled(f, base, size) && stx__file_sort(f);
}
