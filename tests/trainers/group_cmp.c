/* group_cmp.c - compares two runs of a trainer (group.sh): their checkpoints, and
   the losses in their logs.

       group_cmp LOSS PARAMS STATE A.safetensors B.safetensors A.jsonl B.jsonl

   LOSS limits the relative difference of a loss, in "train" and "eval" lines. PARAMS
   limits the relative difference of the parameters: the norm of all differences over
   the norm of all values. In addition, for each tensor, the largest difference over the
   largest value has a limit of 30 times PARAMS: a small tensor has rounding errors that
   are negligible in the norm of all parameters. STATE limits, in the same way for each
   tensor, the streams' memory, the optimiser state and gradients that are not applied
   yet. Names, shapes, non-float tensors, and metadata that training does not compute
   must be equal. All other values in the logs must agree to 0.2 %.

   Prints the differences. Exit code: 0 if all is within the limits, 1 if not (also for
   NaN or nothing to compare), 2 if a file cannot be read.

   The program has a separate safetensors reader, which supports only what the trainers
   write. */
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void stop(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    printf("\n");
    exit(2);
}

static char *read_all(const char *path, size_t *n) {
    FILE *f = fopen(path, "rb");
    char *s;
    long size;
    if (!f || fseek(f, 0, SEEK_END) || (size = ftell(f)) < 0 || fseek(f, 0, SEEK_SET)) {
        stop("%s cannot be read", path);
        return NULL;
    }
    s = (char *)malloc((size_t)size + 1);
    if (!s || fread(s, 1, (size_t)size, f) != (size_t)size) {
        stop("%s cannot be read", path);
        return NULL;
    }
    fclose(f);
    s[size] = 0;
    *n = (size_t)size;
    return s;
}

enum { TENSORS = 4096, NAME = 128 };

typedef struct tensor {
    char name[NAME], shape[NAME];
    int is_float;
    const char *data;
    size_t bytes;
} tensor;

typedef struct file {
    char *all, *meta;
    size_t meta_len, count;
    tensor t[TENSORS];
} file;

/* Returns the position after the string that begins at p. */
static const char *past_string(const char *p) {
    for (p++; *p && *p != '"'; p++)
        if (*p == '\\') p++;
    return p + 1;
}

static void copy(char *to, const char *from, const char *end) {
    size_t n = (size_t)(end - from);
    if (end < from || n >= NAME) stop("a name is too long");
    memcpy(to, from, n);
    to[n] = 0;
}

/* Reads one entry of the header: the tensor's name, shape and data offsets. `open` and
   `end` point to the braces of the tensor's description; `data` and `size` describe the
   data of all tensors. */
static void read_tensor(tensor *t, const char *path, const char *name, const char *open,
                        const char *end, const char *data, size_t size) {
    const char *at;
    unsigned long from = 0, to = 0;
    copy(t->name, name, strchr(name, '"'));
    at = strstr(open, "\"shape\":[");
    if (!at || at >= end) stop("%s: %s has no shape", path, t->name);
    copy(t->shape, at + 8, strchr(at, ']') + 1);
    at = strstr(open, "\"dtype\":\"");
    t->is_float = at && at < end && !strncmp(at + 9, "F32\"", 4);
    at = strstr(open, "\"data_offsets\":[");
    if (!at || at >= end || sscanf(at + 16, "%lu,%lu", &from, &to) != 2 || to < from || to > size)
        stop("%s: %s has invalid offsets", path, t->name);
    t->data = data + from;
    t->bytes = to - from;
}

static void load(file *f, const char *path) {
    size_t size, head = 0, i;
    const char *p, *end;
    f->all = read_all(path, &size);
    for (i = 8; i-- > 0;) head = head << 8 | (unsigned char)(size >= 8 ? f->all[i] : 0);
    if (size < 8 || head > size - 8) stop("%s is not a safetensors file", path);
    p = f->all + 8;
    end = p + head;
    f->count = 0;
    while (p < end) {
        const char *name, *open;
        while (p < end && *p != '"') p++;
        if (p >= end) break;
        name = p + 1;
        p = past_string(p) + 1; /* skips the colon */
        open = p;
        while (p < end && *p != '}') p = *p == '"' ? past_string(p) : p + 1;
        p++;
        if (!strncmp(name, "__metadata__\"", 13)) {
            f->meta = (char *)open;
            f->meta_len = (size_t)(p - open);
            continue;
        }
        if (f->count == TENSORS) stop("%s: too many tensors", path);
        read_tensor(&f->t[f->count++], path, name, open, p, end, size - 8 - head);
    }
    if (!f->count || !f->meta) stop("%s has no tensors or no metadata", path);
}

/* Overwrites with spaces the metadata values that training computes, and the values
   that depend on them. */
static void blank(file *f) {
    static const char *const key[] = {"best", "seal", "checksum", "tau"};
    char *p = f->meta, *end = p + f->meta_len;
    while (p < end) {
        char *name, *value;
        size_t k;
        while (p < end && *p != '"') p++;
        if (p >= end) break;
        name = p + 1;
        p = (char *)past_string(p) + 1;
        value = p;
        if (*p != '"') continue;
        p = (char *)past_string(p);
        for (k = 0; k < sizeof key / sizeof *key; k++)
            if (!strncmp(name, key[k], strlen(key[k])) && name[strlen(key[k])] == '"')
                memset(value, ' ', (size_t)(p - value));
    }
}

static const char *past_spaces(const char *p, const char *end) {
    while (p < end && *p == ' ') p++;
    return p;
}

static int same_meta(file *a, file *b) {
    const char *p = a->meta, *q = b->meta, *pe = p + a->meta_len, *qe = q + b->meta_len;
    blank(a);
    blank(b);
    for (;; p++, q++) {
        p = past_spaces(p, pe);
        q = past_spaces(q, qe);
        if (p == pe || q == qe) return p == pe && q == qe;
        if (*p != *q) {
            printf("metadata differ: %.60s and %.60s; ", p, q);
            return 0;
        }
    }
}

/* Sums over a list of tensors, and the tensor with the largest error. */
typedef struct apart {
    double diff2, size2, worst;
    const char *name;
    size_t tensors;
    int nan;
} apart;

static void add(apart *s, const tensor *a, const tensor *b) {
    size_t i, n = a->bytes / 4;
    double diff = 0, size = 0;
    for (i = 0; i < n; i++) {
        float u, v;
        double d;
        memcpy(&u, a->data + 4 * i, 4);
        memcpy(&v, b->data + 4 * i, 4);
        d = fabs((double)u - (double)v);
        if (!(d <= 1e300)) s->nan = 1;
        if (d > diff) diff = d;
        if (fabs((double)u) > size) size = fabs((double)u);
        s->diff2 += d * d;
        s->size2 += (double)u * (double)u;
    }
    if (diff > 0 && (s->nan || diff / size > s->worst || !(size > 0))) {
        s->worst = diff / size;
        s->name = a->name;
    }
    s->tensors++;
}

/* Returns the norm of the differences divided by the norm of the values, or NaN if a
   difference is not finite. */
static double norm(const apart *s) {
    if (s->nan) return (double)NAN;
    return s->diff2 > 0 ? sqrt(s->diff2 / s->size2) : 0;
}

static int begins(const char *s, const char *with) {
    return !strncmp(s, with, strlen(with));
}

/* Nonzero if a tensor belongs to the state (memory, optimiser, gradients). All other
   tensors are parameters. */
static int of_state(const char *name) {
    if (begins(name, "arch.")) name += 5;
    return begins(name, "memory.") || begins(name, "state.") || begins(name, "optim.")
           || begins(name, "grads");
}

/* A log line that contains the loss of a training step ('t') or of an evaluation
   ('e'). */
typedef struct record {
    char event;
    double step, loss;
    char *line;
} record;

/* Reads the next line that has a loss, starting at *at. Returns 0 if there is none. */
static int next_loss(char **at, record *r) {
    char *line;
    memset(r, 0, sizeof *r);
    while ((line = *at) != NULL && *line) {
        char *end = strchr(line, '\n'), *e, *s, *l;
        *at = end ? end + 1 : NULL;
        if (end) *end = 0;
        e = strstr(line, "\"event\":\"");
        s = strstr(line, "\"step\":");
        l = strstr(line, "\"loss\":");
        if (!e || !s || !l || !(begins(e + 9, "train\"") || begins(e + 9, "eval\""))) continue;
        r->event = e[9];
        r->step = strtod(s + 7, NULL);
        r->loss = strtod(l + 7, NULL);
        r->line = line;
        return 1;
    }
    return 0;
}

/* Nonzero if two lines have the same values, apart from times and memory sizes. The
   tolerance is 0.2 %, because the values in lists are printed with four digits. For the
   fraction of the information that compression loses (train_compressive's "ratio"), the
   tolerance is 5 %. With --batch-split, this fraction is the mean over parts of the
   batch, and a group of ranks divides the batch differently. */
static int same_figures(char *p, char *q) {
    static const char *const skip[] = {"\"tokens_per_s\":", "\"seconds\":", "\"peak_bytes\":"};
    double within = 2e-3;
    while (*p && *q) {
        char *pe, *qe;
        size_t k;
        for (k = 0; k < sizeof skip / sizeof *skip; k++)
            if (begins(p, skip[k]) && begins(q, skip[k])) {
                p += strcspn(p, ",}");
                q += strcspn(q, ",}");
            }
        if (*p == '"' && p[1] != ':') within = begins(p, "\"ratio\":") ? 5e-2 : 2e-3;
        if (strchr("-0123456789", *p)) {
            double u = strtod(p, &pe), v = strtod(q, &qe);
            if (pe > p && qe > q) {
                if (!(fabs(u - v) <= within * fabs(u) + 1e-6)) return 0;
                p = pe;
                q = qe;
                continue;
            }
        }
        if (*p++ != *q++) return 0;
    }
    return *p == *q;
}

/* Compares the tensors of two checkpoints. Returns the number of non-float tensors that
   differ. */
static int compare_tensors(const file *a, const file *b, apart *params, apart *state) {
    size_t i;
    int bad = 0;
    if (a->count != b->count)
        stop("%lu tensors and %lu", (unsigned long)a->count, (unsigned long)b->count);
    for (i = 0; i < a->count; i++) {
        const tensor *t = &a->t[i], *u = &b->t[i];
        if (strcmp(t->name, u->name) || strcmp(t->shape, u->shape) || t->is_float != u->is_float
            || t->bytes != u->bytes)
            stop("%s %s and %s %s", t->name, t->shape, u->name, u->shape);
        if (t->is_float)
            add(of_state(t->name) ? state : params, t, u);
        else if (memcmp(t->data, u->data, t->bytes)) {
            printf("%s differs; ", t->name);
            bad++;
        }
    }
    return bad;
}

/* Compares two logs. *worst receives the largest relative difference of a loss, and
   *lines the number of lines. Returns nonzero if all other values agree. */
static int compare_logs(char *x, char *y, double *worst, size_t *lines) {
    int good = 1;
    for (;;) {
        record a, b;
        int more = next_loss(&x, &a);
        double d;
        if (more != next_loss(&y, &b) || a.event != b.event || a.step < b.step || a.step > b.step) {
            printf("the logs have different lines at step %g; ", a.step);
            return 0;
        }
        if (!more) return good;
        if (!same_figures(a.line, b.line)) {
            if (good) printf("values differ: %.300s; ", a.line);
            good = 0;
        }
        d = fabs(a.loss - b.loss) / fabs(a.loss);
        if (!(d <= *worst) && !isnan(*worst)) *worst = d;
        ++*lines;
    }
}

int main(int argc, char **argv) {
    static file a, b;
    apart params = {0, 0, 0, "", 0, 0}, state = {0, 0, 0, "", 0, 0};
    double limit[3], losses = 0;
    size_t i, n, lines = 0;
    int bad;
    if (argc != 8)
        stop("usage: group_cmp LOSS PARAMS STATE A.safetensors B.safetensors A.jsonl B.jsonl");
    for (i = 0; i < 3; i++) limit[i] = strtod(argv[1 + i], NULL);
    load(&a, argv[4]);
    load(&b, argv[5]);
    bad = !same_meta(&a, &b);
    bad |= compare_tensors(&a, &b, &params, &state) > 0;
    bad |= !compare_logs(read_all(argv[6], &n), read_all(argv[7], &n), &losses, &lines);
    bad |= !(losses <= limit[0]);
    bad |= !(norm(&params) <= limit[1]) || !(params.worst <= 30 * limit[1]);
    bad |= !(state.worst <= limit[2]) || state.nan;
    if (!lines || !params.tensors || !state.tensors) {
        printf("nothing to compare; ");
        bad = 1;
    }
    printf("%lu losses %.1e, parameters %.1e (%s %.1e), state %.1e (%s)\n", (unsigned long)lines,
           losses, norm(&params), params.name, params.worst, state.worst, state.name);
    return bad;
}
