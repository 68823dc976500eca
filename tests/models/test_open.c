/* test_open.c - models in files, beyond what the tests of the families check for all
   variants of their models: values of fields, errors, damaged files, files of other
   programs, programs that accept any family. */
#include <locale.h>
#include <stdint.h>
#include "../../seqtx_attn_span.h"
#include "../../seqtx_compressive.h"
#include "../../seqtx_par.h"
#include "../../seqtx_sru.h"
#include "../files.h"
#include "family.h"

enum { V = 29, FAMILIES = 4 };

static const stx_family *family(int k) {
    if (k == 0) return stx_span_family();
    if (k == 1) return stx_sru_family();
    return k == 2 ? stx_comp_family() : stx_par_family();
}

/* Returns a small model of family k, with a text or lists in its desc where there are
   any. */
static void *small(stx_ctx *x, int k) {
    static const size_t mems[2] = {4, 0}, projs[2] = {3, 0};
    if (k == 0) {
        stx_span_desc d = {0};
        d.vocab = V;
        d.layers = 2;
        d.dim = 8;
        d.heads = 2;
        d.inner = 5;
        d.span = 20;
        d.adapt_span = 1;
        d.adapt_io = 1;
        d.cutoffs = 2;
        d.cutoff[0] = 5;
        d.cutoff[1] = 20;
        d.divval = 2.7;
        d.dropout = 0.1;
        return stx_span_create(x, &d);
    }
    if (k == 1) {
        stx_sru_lm_desc d = {0};
        d.vocab = V;
        d.dim = 8;
        d.sru.layers = 2;
        d.sru.projs = projs;
        d.sru.highway_bias = -1.3;
        return stx_sru_lm_create(x, &d);
    }
    if (k == 2) {
        stx_comp_desc d = {0};
        d.vocab = V;
        d.dim = 8;
        d.layers = 2;
        d.heads = 2;
        d.inner = 5;
        d.segment = 6;
        d.mems = mems;
        return stx_comp_create(x, &d);
    }
    {
        stx_par_desc d = {0};
        d.vocab = V;
        d.dim = 8;
        d.heads = 2;
        d.inner = 5;
        d.segment = 4;
        d.pattern = "(sf)2i";
        return stx_par_create(x, &d);
    }
}

/* A file in memory. The bytes are a separate allocation, whose size the address sanitizer
   knows. */
typedef struct image {
    unsigned char *bytes;
    size_t n;
} image;

/* Finishes a writer. The caller frees the bytes. */
static image finish(stx_ctx *x, stx_writer *w) {
    image f = {NULL, 0};
    void *bytes = stx_writer_bytes(w, &f.n);
    CHECK(bytes != NULL, "%s", stx_error(x));
    f.bytes = (unsigned char *)malloc(f.n + 1);
    if (bytes) memcpy(f.bytes, bytes, f.n);
    stx_block_free(x, bytes);
    return f;
}

static image saved(stx_ctx *x, const stx_family *f, void *m) {
    stx_writer *w = stx_writer_create(x);
    EXPECT(stx_model_write(w, f, m) && stx_writer_checksum(w));
    return finish(x, w);
}

static void *read_image(stx_ctx *x, const stx_family *family_, image i) {
    stx_file *f = stx_file_in_memory(x, "FILE", i.bytes, i.n);
    void *m = f ? stx_model_read(x, family_, f) : NULL;
    stx_file_close(f);
    return m;
}

/* A new file: the entries of `from`, in which the metadata `key` has the value `value`
   (NULL: is missing), and the tensor `drop` (if not NULL) is missing. */
typedef struct change {
    const char *key, *value, *drop;
    int seal;
} change;

static image rewrite(stx_ctx *x, const stx_family *f, image from, change c) {
    stx_file *in = stx_file_in_memory(x, "FILE", from.bytes, from.n);
    stx_writer *w = stx_writer_create(x);
    char key[64];
    image out;
    size_t i;
    for (i = 0; i < f->fields + 2; i++) {
        const char *name = i == f->fields ? "family" : "version", *value;
        if (i < f->fields) name = f->field[i].name;
        snprintf(key, sizeof key, "model.%s", name);
        value = stx_file_meta(in, key);
        if (c.key && !strcmp(c.key, key)) {
            value = c.value;
            c.key = NULL;
        }
        if (value) stx_writer_meta(w, key, value);
    }
    if (c.key) stx_writer_meta(w, c.key, c.value);
    for (i = 0; i < stx_file_count(in); i++) {
        const stx_entry *e = stx_file_entry(in, i);
        if (!c.drop || strcmp(c.drop, e->name))
            stx_writer_add(w, e->name, e->dtype, e->ndim, e->dim, e->data);
    }
    if (c.seal) stx_writer_checksum(w);
    out = finish(x, w);
    stx_file_close(in);
    return out;
}

/* The error of a function that returned NULL begins with the path and contains a and b.
   Clears it. */
static void says(stx_ctx *x, int code, const char *path, const char *a, const char *b) {
    CHECK(stx_error_code(x) == code, "code %d: %s", stx_error_code(x), stx_error(x));
    CHECK(strstr(stx_error(x), path) == stx_error(x), "no path: %s", stx_error(x));
    CHECK(strstr(stx_error(x), a) && strstr(stx_error(x), b), "expected %s, %s: %s", a, b,
          stx_error(x));
    stx_clear_error(x);
}

/* A change must be refused with these words, and leave nothing behind. */
static void refused(stx_ctx *x, const stx_family *f, image good, change c, const char *a,
                    const char *b) {
    const size_t bytes = stx_bytes(x);
    image bad = rewrite(x, f, good, c);
    CHECK(!read_image(x, f, bad), "%s %s was accepted", a, b);
    says(x, STX_ERR_FORMAT, "FILE: ", a, b);
    CHECK(stx_bytes(x) == bytes, "%zu bytes, then %zu", bytes, stx_bytes(x));
    free(bad.bytes);
}

/* Every field: missing, malformed, in a wrong form. */
static void fields(stx_ctx *x, const stx_family *f, image good) {
    char key[64];
    size_t i;
    for (i = 0; i < f->fields; i++) {
        const stx_field *p = &f->field[i];
        const int real = p->kind == STX_FIELD_REAL, list = p->kind == STX_FIELD_LIST;
        change c = {NULL, NULL, NULL, 1};
        if (p->kind == STX_FIELD_SETTING || p->kind == STX_FIELD_CODE) continue;
        snprintf(key, sizeof key, "model.%s", p->name);
        c.key = key;
        refused(x, f, good, c, key, "got nothing");
        if (p->kind == STX_FIELD_TEXT) continue;
        c.value = "1x";
        refused(x, f, good, c, key, "\"1x\"");
        c.value = "1,2,3,4,5,6,7,8,9"; /* more than any array of a desc or list of `small` has */
        refused(x, f, good, c, key, "\"1,2,3");
        c.value = real ? "1e999" : "99999999999999999999";
        refused(x, f, good, c, key, c.value);
        c.value = real ? "nan" : "0x1";
        refused(x, f, good, c, key, c.value);
        c.value = list ? "1," : "";
        refused(x, f, good, c, key, "damaged");
        if (p->kind != STX_FIELD_SIZE && p->kind != STX_FIELD_UNSIGNED) continue;
        c.value = "-1";
        refused(x, f, good, c, key, "\"-1\"");
    }
}

static void errors(int k) {
    static const char *const layers[FAMILIES] = {"layers", "layers", "layers", "blocks"};
    const stx_family *f = family(k), *next = family((k + 1) % FAMILIES);
    stx_ctx *x = context(1, 3), *y = context(1, 3);
    void *m = small(x, k);
    const stx_params *p = f->params(m, 0);
    const image good = saved(x, f, m);
    change c = {"model.version", "2", NULL, 1};
    stx_file *file;
    char key[64], *text;
    size_t n;
    int i;
    fields(x, f, good);
    refused(x, f, good, c, "model.version", "newer version of seqtx");
    c.value = NULL;
    refused(x, f, good, c, "model.version", "got \"\"");
    c.key = "model.family";
    refused(x, f, good, c, "model.family", "got nothing");
    c.value = "other";
    refused(x, f, good, c, "model.family", "\"other\"");
    c.key = "model.new_field";
    c.value = "1";
    refused(x, f, good, c, "model.new_field", "newer");

    /* invalid and impossible sizes, with and without a checksum */
    for (c.seal = 0; c.seal < 2; c.seal++) {
        snprintf(key, sizeof key, "model.%s%s", k == 1 ? "sru." : "", layers[k]);
        c.key = key;
        c.value = "4098";
        refused(x, f, good, c, "FILE", "4098");
        c.key = k == 2 ? "model.inner" : "model.vocab";
        c.value = "31";
        refused(x, f, good, c, "tensor \"", "which the metadata \"model.*\" describes");
        c.key = NULL;
        c.drop = p->name[p->count - 1];
        refused(x, f, good, c, c.drop, "no tensor");
        c.drop = NULL;
    }

    /* a wrong family, no file, a file in another context, NULL */
    EXPECT(!read_image(x, next, good));
    says(x, STX_ERR_FORMAT, "FILE: ", next->name, f->name);
    EXPECT(!stx_model_open(x, f, in_dir("none")));
    says(x, STX_ERR_IO, "", in_dir("none"), "");
    EXPECT(!stx_model_open(x, f, NULL));
    says(x, STX_ERR_ARG, "", "path", "NULL");
    file = stx_file_in_memory(y, "FILE", good.bytes, good.n);
    EXPECT(!stx_model_read(x, f, file));
    says(x, STX_ERR_ARG, "", "same context", "");
    stx_file_close(file);
    EXPECT(!stx_model_read(x, f, NULL) && !stx_model_read(x, NULL, NULL));
    stx_clear_error(x);
    EXPECT(!stx_model_save(f, NULL, in_dir("never")) && !stx_model_write(NULL, f, m) && stx_ok(x));

    /* a file that was cut off, at its path */
    EXPECT(stx_model_save(f, m, in_dir("whole")));
    text = get_file(in_dir("whole"), &n);
    put_file(in_dir("cut"), text, n - 1);
    EXPECT(!stx_model_open(x, f, in_dir("cut")));
    says(x, STX_ERR_FORMAT, in_dir("cut"), "damaged", "");
    EXPECT(stx_model_open(x, f, in_dir("whole")) != NULL);

    /* after many failures, the context works */
    c.key = "model.version";
    c.value = "31";
    for (i = 0; i < 300; i++) refused(x, f, good, c, "model.version", "31");
    CHECK(read_image(x, f, good) != NULL, "%s", stx_error(x));
    free(good.bytes);
    stx_destroy(y);
    stx_destroy(x);
}

/* Files of other programs: no checksum, other floating-point types, other entries. */
static void other_programs(int k) {
    const stx_family *f = family(k);
    stx_ctx *x = context(1, 3);
    void *m = small(x, k), *n;
    change c = {"comment", "by another program", NULL, 0};
    const stx_params *p = f->params(m, 0);
    const image good = saved(x, f, m);
    image other = rewrite(x, f, good, c);
    size_t i, j, e;
    n = read_image(x, f, other);
    CHECK(n != NULL, "%s", stx_error(x));
    if (n) EXPECT(equal_params(x, p, x, f->params(n, 0)) && same_desc(f, f->desc(m), f->desc(n)));
    free(other.bytes);

    /* all tensors as F64, then one of them as U8 */
    for (j = 0; j < 2; j++) {
        stx_writer *w = stx_writer_create(x);
        EXPECT(stx_desc_write(w, f, f->desc(m)));
        for (i = 0; i < p->count; i++) {
            const stx_tensor *t = p->tensor[i];
            double *v = (double *)malloc(t->size * sizeof *v);
            for (e = 0; e < t->size; e++) v[e] = (double)t->data[e];
            EXPECT(stx_writer_add_copy(w, p->name[i], j && !i ? STX_U8 : STX_F64, t->ndim, t->dim,
                                       v));
            memset(v, 255, t->size * sizeof *v); /* does not change the copy */
            free(v);
        }
        other = finish(x, w);
        n = read_image(x, f, other);
        if (j) {
            EXPECT(!n);
            says(x, STX_ERR_FORMAT, "FILE: ", p->name[0], "U8");
        } else {
            CHECK(n != NULL, "%s", stx_error(x));
            if (n) EXPECT(equal_params(x, p, x, f->params(n, 0)));
        }
        free(other.bytes);
    }
    free(good.bytes);
    stx_destroy(x);
}

/* Random values of all fields, valid or not, are the same after writing and reading. */
static void values(int k) {
    static const double reals[] = {0,    -0.0,          0.1, 1.0 / 3,
                                   2,    -123456789.25, 0.3, 1.7976931348623157e308,
                                   1e22, -2.5e-7,       5e-324};
    static const size_t sizes[] = {0, 1, 255, 20000, (size_t)1 << 30, SIZE_MAX, SIZE_MAX - 1};
    static const int ints[] = {0, 1, -1, 77, 2147483647, -2147483647};
    const stx_family *f = family(k);
    stx_ctx *x = context(1, 3);
    char *a = (char *)malloc(f->desc_size), *b = (char *)malloc(f->desc_size);
    size_t round, i, e;
    for (round = 0; round < 40; round++) {
        static const size_t list[] = {SIZE_MAX, 0, 12, 7};
        stx_writer *w = stx_writer_create(x);
        stx_file *file;
        void *bytes;
        size_t n, pick = round;
        memset(a, 0, f->desc_size);
        memset(b, 255, f->desc_size);
        for (i = 0; i < f->fields; i++) {
            const stx_field *p = &f->field[i];
            char *at = a + p->offset;
            for (e = 0; e < p->count; e++, pick = pick * 7 + 3) {
                const int s = ints[pick % 6];
                if (p->kind == STX_FIELD_SIZE) ((size_t *)(void *)at)[e] = sizes[pick % 7];
                if (p->kind == STX_FIELD_INT) *(int *)(void *)at = s;
                if (p->kind == STX_FIELD_INT32) *(int32_t *)(void *)at = s;
                if (p->kind == STX_FIELD_UNSIGNED) *(unsigned *)(void *)at = 4000000000u + round;
                if (p->kind == STX_FIELD_REAL) ((double *)(void *)at)[e] = reals[pick % 11];
                if (p->kind == STX_FIELD_TEXT && round % 3) *(const char **)(void *)at = "s\"\n,f";
                if (p->kind != STX_FIELD_LIST) continue;
                *(size_t *)(void *)(a + p->length) = 1 + round % 4;
                if (round % 5) *(const size_t **)(void *)at = list;
            }
        }
        EXPECT(stx_desc_write(w, f, a));
        bytes = stx_writer_bytes(w, &n);
        CHECK(bytes != NULL, "%s", stx_error(x));
        file = stx_file_in_memory(x, "desc", bytes, n);
        CHECK(stx_desc_read(x, f, file, b), "%s", stx_error(x));
        CHECK(same_desc(f, a, b), "%s, round %zu", f->name, round);
        stx_file_close(file);
        stx_block_free(x, bytes);
    }
    for (i = 0; i < f->fields; i++) { /* NaN and code cannot be stored */
        const stx_field *p = &f->field[i];
        stx_writer *w = stx_writer_create(x);
        memset(a, 0, f->desc_size);
        if (p->kind == STX_FIELD_REAL) *(double *)(void *)(a + p->offset) = HUGE_VAL;
        else if (p->kind == STX_FIELD_CODE) a[p->offset] = 1;
        else {
            stx_writer_free(w);
            continue;
        }
        EXPECT(!stx_desc_write(w, f, a) && strstr(stx_error(x), p->name));
        stx_clear_error(x);
        EXPECT(!stx_writer_finish(w, in_dir("never")));
        stx_clear_error(x);
    }
    free(a);
    free(b);
    stx_destroy(x);
}

/* Reads a damaged copy of a file: byte `at` is `value`, and only n bytes are left.
   Returns 1 if it was read. With a checksum, that must be the model m. */
static int damaged(const stx_family *f, stx_ctx *x, void *m, image good, size_t at, int value,
                   size_t n, int seal) {
    image bad;
    stx_desc d;
    stx_ctx *y;
    void *got;
    memset(&d, 0, sizeof d);
    d.threads = 1;
    d.max_bytes = 1 << 24; /* a damaged size fails early */
    y = stx_create(&d);
    bad.n = n;
    bad.bytes = (unsigned char *)malloc(n ? n : 1);
    memcpy(bad.bytes, good.bytes, n);
    if (at < n) bad.bytes[at] = (unsigned char)value;
    got = read_image(y, f, bad);
    CHECK(!got == !stx_ok(y), "%s", stx_error(y));
    if (got && seal)
        CHECK(same_desc(f, f->desc(m), f->desc(got))
              && equal_params(x, f->params(m, 0), y, f->params(got, 0)), "byte %zu", at);
    if (!got) {
        CHECK(strstr(stx_error(y), "FILE"), "%s", stx_error(y));
        stx_clear_error(y);
        CHECK(read_image(y, f, good) != NULL, "%s", stx_error(y));
    }
    free(bad.bytes);
    stx_destroy(y);
    return got != NULL;
}

/* Files that are truncated or have a changed byte, three of four times in the header. A
   file with a checksum is refused or gives the same model; without one, it can give
   another model. */
static void damage(int k, int rounds) {
    const stx_family *f = family(k);
    stx_ctx *x = context(1, 3);
    void *m = small(x, k);
    change c = {NULL, NULL, NULL, 0};
    int r, seal, opened = 0;
    for (seal = 0; seal < 2; seal++) {
        image whole = saved(x, f, m), good;
        size_t header, at;
        c.seal = seal;
        good = rewrite(x, f, whole, c);
        header = 8 + good.bytes[0] + 256u * good.bytes[1];
        for (r = 0; r < rounds; r++) {
            size_t n = good.n;
            int value;
            at = (size_t)((test_rand() + 1) * 0.5 * (double)(r % 4 ? header : n - 1));
            value = good.bytes[at] ^ (1 << r / 8 % 8);
            if (r % 8 == 0) n = at;
            if (r % 8 > 4) value = "0123456789,.-\"x"[r / 8 % 15]; /* plausible values */
            opened += damaged(f, x, m, good, at, value, n, seal);
        }
        free(whole.bytes);
        free(good.bytes);
    }
    CHECK(opened > 0 && opened < rounds, "%d of %d files were read", opened, 2 * rounds);
    stx_destroy(x);
}

/* Allocations that fail one after the other: an error, or the model; and a full disk. */
static void memory_errors(int k) {
    const stx_family *f = family(k);
    stx_ctx *x = context(1, 3);
    void *m = small(x, k);
    const image good = saved(x, f, m);
    int n, left;
    for (n = 0; n < 400; n++) {
        stx_ctx *y;
        void *got;
        left = n;
        y = limited_context(&left);
        if (!y) continue;
        got = stx_ok(y) ? read_image(y, f, good) : NULL;
        CHECK(!got == !stx_ok(y), "%s", stx_error(y));
        if (!got) CHECK(stx_error_code(y) == STX_ERR_MEMORY, "%s", stx_error(y));
        if (got) EXPECT(equal_params(x, f->params(m, 0), y, f->params(got, 0)));
        stx_destroy(y);
        if (got) break;
    }
    CHECK(n > 5 && n < 400, "%d", n);
    free(good.bytes);
    EXPECT(!stx_model_save(f, m, in_dir("no/such/directory")));
    EXPECT(stx_error_code(x) == STX_ERR_IO);
    stx_destroy(x);
}

/* Any family in one call, by the family's own functions, and with packed weights. */
static void any(void) {
    const stx_family *all[FAMILIES];
    stx_ctx *x = context(1, 3);
    stx_lm lm, from;
    stx_real a[V], b[V];
    double u[3], v[3];
    int k;
    for (k = 0; k < FAMILIES; k++) all[k] = family(k);
    for (k = 0; k < FAMILIES; k++) {
        const char *path = in_dir("any");
        void *m = small(x, k);
        from = all[k]->as_lm(m);
        EXPECT(from.family == all[k]);
        EXPECT(stx_model_save(from.family, from.model, path));
        lm = stx_lm_open(x, path, all, FAMILIES);
        CHECK(lm.model && lm.family == all[k], "%s", stx_error(x));
        if (!lm.model) continue;
        EXPECT(model_outputs(&from, V, u, a) && model_outputs(&lm, V, v, b));
        EXPECT(!memcmp(a, b, sizeof a) && !memcmp(u, v, sizeof u));

        lm = stx_lm_open(x, path, all + (k == 0), 1);
        CHECK(!lm.model == (k != 0 || !lm.model), "%s", stx_error(x));
        stx_clear_error(x);
        lm = stx_lm_open(x, path, all + (k + 1) % FAMILIES, 1);
        EXPECT(!lm.model && strstr(stx_error(x), "model.family") && strstr(stx_error(x), path));
        stx_clear_error(x);
    }
    lm = stx_lm_open(x, in_dir("none"), all, FAMILIES);
    EXPECT(!lm.model && stx_error_code(x) == STX_ERR_IO);
    stx_clear_error(x);

    /* a model without a vocabulary is no language model */
    {
        stx_par_desc d = {0};
        d.dim = 8;
        d.heads = 2;
        d.pattern = "sf";
        d.segment = 4;
        EXPECT(stx_par_save(stx_par_create(x, &d), in_dir("vectors")));
        EXPECT(stx_par_open(x, in_dir("vectors")) != NULL);
        lm = stx_lm_open(x, in_dir("vectors"), all, FAMILIES);
        EXPECT(!lm.model && strstr(stx_error(x), "vocabulary"));
        stx_clear_error(x);
    }
    {
        stx_span *s = (stx_span *)small(x, 0);
        stx_sru_lm *r = (stx_sru_lm *)small(x, 1);
        stx_comp *c = (stx_comp *)small(x, 2);
        EXPECT(stx_span_save(s, in_dir("a")) && stx_span_open(x, in_dir("a")));
        EXPECT(stx_sru_lm_save(r, in_dir("a")) && stx_sru_lm_open(x, in_dir("a")));
        EXPECT(stx_comp_save(c, in_dir("a")) && stx_comp_open(x, in_dir("a")));
        EXPECT(!stx_span_open(x, in_dir("a")) && !stx_span_save(NULL, in_dir("a")));
    }
    stx_destroy(x);
}

/* Weights packed after opening are those packed before saving. */
static void packed(void) {
    static const int kind[2] = {STX_WEIGHTS_BF16, STX_WEIGHTS_INT8};
    int k, i;
    for (i = 0; i < 2; i++)
        for (k = 0; k < 2; k++) {
            stx_ctx *x = context(1, 3);
            stx_real a[V], b[V];
            double u[3], v[3];
            stx_span_desc d = {0};
            stx_span *m, *n;
            stx_lm p, q;
            d.vocab = V;
            d.layers = 2;
            d.dim = 64;
            d.span = 32;
            m = stx_span_create(x, &d);
            if (k) EXPECT(stx_params_pack(stx_span_params(m), kind[i]) > 0);
            EXPECT(stx_span_save(m, in_dir("p")));
            n = stx_span_open(x, in_dir("p"));
            if (!EXPECT(n != NULL)) continue;
            EXPECT(equal_params(x, m->params, x, n->params));
            if (!k) EXPECT(stx_params_pack(stx_span_params(m), kind[i]) > 0);
            EXPECT(stx_params_pack(stx_span_params(n), kind[i]) > 0);
            p = stx_span_as_lm(m);
            q = stx_span_as_lm(n);
            EXPECT(model_outputs(&p, V, u, a) && model_outputs(&q, V, v, b));
            EXPECT(!memcmp(u, v, sizeof u) && !memcmp(a, b, sizeof a));
            stx_destroy(x);
        }
}

/* Files do not depend on the locale. */
static void locales(void) {
    static const char *const name[] = {"de_DE.UTF-8", "de_DE.utf8", "fr_FR.UTF-8", "fr_FR.utf8"};
    size_t i;
    for (i = 0; i < 4 && !setlocale(LC_NUMERIC, name[i]); i++) {}
    if (i == 4) {
        printf("skipped: no locale with a decimal comma\n");
        return;
    }
    values(0);
    {
        stx_ctx *x = context(1, 3);
        stx_file *f;
        EXPECT(stx_span_save((stx_span *)small(x, 0), in_dir("l")));
        EXPECT(stx_span_open(x, in_dir("l")) != NULL);
        f = stx_file_open(x, in_dir("l"));
        SAME(stx_file_meta(f, "model.divval"), "2.7");
        stx_file_close(f);
        stx_destroy(x);
    }
    setlocale(LC_NUMERIC, "C");
}

int main(int argc, char **argv) {
    const int rounds = argc > 1 && !strcmp(argv[1], "short") ? 40 : 160;
    int k;
    if (!dir_create("open")) return 1;
    for (k = 0; k < FAMILIES; k++) {
        errors(k);
        other_programs(k);
        values(k);
        damage(k, rounds);
        memory_errors(k);
    }
    any();
    packed();
    locales();
    EXPECT(dir_entries(dir, ".tmp") == 0);
    remove_tree(dir);
    return test_end();
}
