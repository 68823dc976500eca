/* family.h - helpers that the test programs of the model families share. Include after
   the header of a family. */
#ifndef STX_TEST_FAMILY_H
#define STX_TEST_FAMILY_H
#include "../values.h"

static inline stx_ctx *context(int threads, uint64_t seed) {
    stx_desc d;
    memset(&d, 0, sizeof d);
    d.threads = threads;
    d.seed = seed;
    return stx_create(&d);
}

/* Returns independent tokens (B,n), which depend only on the seed. The caller frees
   them. */
static inline int32_t *random_tokens(size_t B, size_t n, int vocab, uint64_t seed) {
    int32_t *t = (int32_t *)malloc((B * n + 1) * sizeof *t);
    size_t i;
    test_state = 88172645463325252u + seed;
    for (i = 0; i < B * n; i++) t[i] = (int32_t)((test_rand() + 1) * 0.4999 * vocab);
    return t;
}

/* Returns tokens (B,n), two thirds of which are determined by their predecessor. The
   caller frees them. */
static inline int32_t *ordered_tokens(size_t B, size_t n, int vocab, uint64_t seed) {
    int32_t *t = (int32_t *)malloc((B * n + 1) * sizeof *t);
    size_t i;
    test_state = 88172645463325252u + seed;
    for (i = 0; i < B * n; i++) {
        if (i && test_rand() < 0.4)
            t[i] = (t[i - 1] * 7 + 3) % vocab;
        else
            t[i] = (int32_t)((test_rand() + 1) * 0.4999 * vocab);
    }
    return t;
}

/* Returns the largest |a|, at least 1, as the scale of differences. */
static inline double largest(const stx_real *a, size_t n) {
    double top = 1;
    size_t i;
    for (i = 0; i < n; i++)
        if (fabs((double)a[i]) > top) top = fabs((double)a[i]);
    return top;
}

/* Adds a random value in (-0.3,0.3) to every parameter, so that tables and biases
   differ from their initial values. p may be NULL. */
static inline void perturb(stx_ctx *x, const stx_params *p) {
    size_t i, k;
    test_state = 88172645463325252u;
    for (i = 0; p && i < p->count; i++) {
        stx_tensor *t = p->tensor[i];
        stx_real *v = (stx_real *)malloc(t->size * sizeof *v);
        stx_get(x, t, v);
        for (k = 0; k < t->size; k++) v[k] += (stx_real)(0.3 * test_rand());
        stx_set(x, t, v);
        free(v);
    }
}

static inline void *limited_alloc(void *user, size_t bytes) {
    int *left = (int *)user;
    return (*left)-- > 0 ? malloc(bytes) : NULL;
}

static inline void limited_release(void *user, void *p) {
    (void)user;
    free(p);
}

/* Returns a single-threaded context whose allocations fail after the first *left, or
   NULL if stx_create itself fails. */
static inline stx_ctx *limited_context(int *left) {
    stx_desc d;
    memset(&d, 0, sizeof d);
    d.alloc = limited_alloc;
    d.release = limited_release;
    d.user = left;
    d.chunk_bytes = 4096;
    d.threads = 1;
    return stx_create(&d);
}

/* Checks that two descs are equal, field by field, except for settings. */
static inline int same_desc(const stx_family *f, const void *a, const void *b) {
    const char *p = (const char *)a, *q = (const char *)b;
    size_t i;
    int same = 1;
    for (i = 0; i < f->fields; i++) {
        const stx_field *d = &f->field[i];
        const void *u = p + d->offset, *v = q + d->offset;
        size_t size = sizeof(size_t), n = d->count;
        if (d->kind == STX_FIELD_SETTING || d->kind == STX_FIELD_CODE) continue;
        if (d->kind == STX_FIELD_INT || d->kind == STX_FIELD_UNSIGNED) size = sizeof(int);
        if (d->kind == STX_FIELD_INT32) size = sizeof(int32_t);
        if (d->kind == STX_FIELD_REAL) size = sizeof(double);
        if (d->kind == STX_FIELD_TEXT || d->kind == STX_FIELD_LIST) {
            u = *(const void *const *)u;
            v = *(const void *const *)v;
            if (d->kind == STX_FIELD_LIST) n = *(const size_t *)(const void *)(p + d->length);
            if (d->kind == STX_FIELD_TEXT && u) {
                size = 1;
                n = strlen((const char *)u) + 1;
            }
        }
        if (!u != !v || (u && memcmp(u, v, n * size))) {
            printf("%s: %s differs\n", f->name, d->name);
            same = 0;
        }
    }
    return same;
}

static inline int equal_params(stx_ctx *x, const stx_params *p, stx_ctx *y, const stx_params *q) {
    size_t i;
    int same = p && q && p->count == q->count;
    for (i = 0; same && i < p->count; i++) {
        const size_t n = p->tensor[i]->size;
        stx_real *u = (stx_real *)malloc(2 * n * sizeof *u);
        stx_get(x, p->tensor[i], u);
        stx_get(y, q->tensor[i], u + n);
        same = !strcmp(p->name[i], q->name[i]) && q->tensor[i]->size == n
               && !memcmp(u, u + n, n * sizeof *u);
        free(u);
    }
    return same && stx_ok(x) && stx_ok(y);
}

/* Computes the losses of three segments of 2 streams with a memory, and scores (V) after
   9 tokens by generation. Returns 1 if the model can generate. */
static inline int model_outputs(const stx_lm *lm, int vocab, double loss[3], stx_real *scores) {
    stx_ctx *x = lm->ctx;
    int32_t *t = ordered_tokens(2, 19, vocab, 5);
    void *state = lm->state_create(lm->model, 2, 0), *gen;
    const stx_real *p = NULL;
    int k;
    for (k = 0; k < 3; k++) {
        stx_begin(x, STX_EVAL);
        loss[k] = stx_item(x, lm->loss(lm->model, token_block(x, t, 2, 19, 6 * (size_t)k, 6),
                                       token_block(x, t, 2, 19, 6 * (size_t)k + 1, 6), state,
                                       state));
    }
    if (state) lm->state_free(state);
    CHECK(stx_ok(x), "%s", stx_error(x));
    gen = lm->gen_create(lm->model, 1, 0);
    if (gen) p = lm->gen_feed(gen, t, 9);
    if (p) memcpy(scores, p, (size_t)vocab * sizeof *p);
    if (gen) lm->gen_free(gen);
    stx_clear_error(x);     /* not all models can generate */
    free(t);
    return p != NULL;
}

/* Returns 1 if the desc has functions of the program, which no file can contain. */
static inline int has_code(const stx_family *f, const void *desc) {
    size_t i;
    for (i = 0; i < f->fields; i++) {
        const void *code;
        if (f->field[i].kind != STX_FIELD_CODE) continue;
        memcpy(&code, (const char *)desc + f->field[i].offset, sizeof code);
        if (code) return 1;
    }
    return 0;
}

/* Saves a model to a file and opens it in another context: the same desc, parameters,
   losses and scores, bit for bit. */
static inline void saved_and_opened(const stx_family *f, void *model, const char *name) {
    stx_ctx *x = f->params(model, 0)->ctx;
    stx_ctx *y = context(stx_threads(x), stx_ctx_desc(x)->seed);
    char path[600];
    void *opened;
    stx_lm a, b;
    int k;
    test_path(path, sizeof path, "opened");
    stx_param(stx_params_create(y), STX_NORMAL, 1, "other", 3, 0, 0, 0);
    if (has_code(f, f->desc(model))) {
        CHECK(!stx_model_save(f, model, path) && strstr(stx_error(x), "cannot be described"),
              "%s: %s", name, stx_error(x));
        stx_clear_error(x);
        stx_destroy(y);
        return;
    }
    CHECK(stx_model_save(f, model, path), "%s: %s", name, stx_error(x));
    opened = stx_model_open(y, f, path);
    remove(path);
    CHECK(opened != NULL, "%s: %s", name, stx_error(y));
    if (opened) {
        CHECK(same_desc(f, f->desc(model), f->desc(opened)), "%s", name);
        for (k = 0; f->params(model, k); k++)
            CHECK(equal_params(x, f->params(model, k), y, f->params(opened, k)), "%s: list %d",
                  name, k);
        CHECK(!f->params(opened, k), "%s: more than %d lists", name, k);
        a = f->as_lm(model);
        b = f->as_lm(opened);
        CHECK(!a.model == !b.model && a.family == b.family, "%s", name);
        if (a.model) {
            const int V_ = (int)a.vocab_io->desc.vocab;
            stx_real *p = (stx_real *)calloc(2 * (size_t)V_, sizeof *p);
            double u[3], v[3];
            int generates;
            stx_set_step_index(y, stx_step_index(x));
            generates = model_outputs(&a, V_, u, p);
            CHECK(generates == model_outputs(&b, V_, v, p + V_), "%s", name);
            for (k = 0; k < 3; k++)
                CHECK(u[k] == v[k], "%s: loss %d: %.17g, then %.17g", name, k, u[k], v[k]);
            CHECK(!memcmp(p, p + V_, (size_t)V_ * sizeof *p), "%s: scores", name);
            free(p);
        }
    }
    stx_destroy(y);
}
#endif
