/* group_cmp.c - how far two runs of a trainer are apart (tests/group.sh): their
   checkpoints, and the losses in their logs.

       group_cmp LOSS PARAMS STATE A.safetensors B.safetensors A.jsonl B.jsonl

   LOSS is the largest relative difference of a loss that is good, of "train" and of
   "eval" lines. PARAMS is that of the parameters: the norm of the difference of all of
   them over the norm of all of them. Each tensor is looked at, too (largest difference
   over largest number), which may be 30 times that: a tensor of few numbers has its own
   rounding, and hides in the norm of the list. STATE is for each tensor of what the
   streams remember, of the optimiser and of gradients that wait, in the same way. What is
   not float, names, shapes and metadata have to be equal, but for metadata that are
   computed numbers or made of them; so have the other figures of the logs, to 0.2 %.
   Prints what it found; exit code 0 if all is good, 1 if not (also where there is nothing
   to compare, or a NaN), 2 if a file cannot be read.

   Its reader of safetensors is its own, as simple as the files that the trainers
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

/* What follows the string that p stands on */
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

static void load(file *f, const char *path) {
    size_t size, head = 0, i;
    const char *p, *end;
    f->all = read_all(path, &size);
    for (i = 8; i-- > 0;) head = head << 8 | (unsigned char)(size >= 8 ? f->all[i] : 0);
    if (size < 8 || head > size - 8) stop("%s is no safetensors file", path);
    p = f->all + 8;
    end = p + head;
    f->count = 0;
    while (p < end) {
        tensor *t = &f->t[f->count];
        const char *name, *brace, *at;
        unsigned long from = 0, to = 0;
        while (p < end && *p != '"') p++;
        if (p >= end) break;
        name = p + 1;
        p = past_string(p) + 1; /* the colon */
        brace = p;
        while (p < end && *p != '}') p = *p == '"' ? past_string(p) : p + 1;
        p++;
        if (!strncmp(name, "__metadata__\"", 13)) {
            f->meta = (char *)brace;
            f->meta_len = (size_t)(p - brace);
            continue;
        }
        if (f->count == TENSORS) stop("%s: too many tensors", path);
        copy(t->name, name, strchr(name, '"'));
        at = strstr(brace, "\"shape\":[");
        if (!at || at >= p) stop("%s: %s has no shape", path, t->name);
        copy(t->shape, at + 8, strchr(at, ']') + 1);
        at = strstr(brace, "\"dtype\":\"");
        t->is_float = at && at < p && !strncmp(at + 9, "F32\"", 4);
        at = strstr(brace, "\"data_offsets\":[");
        if (!at || at >= p || sscanf(at + 16, "%lu,%lu", &from, &to) != 2 || to < from
            || to > size - 8 - head)
            stop("%s: %s has no place", path, t->name);
        t->data = end + from;
        t->bytes = to - from;
        f->count++;
    }
    if (!f->count || !f->meta) stop("%s holds nothing", path);
}

/* Values of metadata that are computed, or made of such, become blanks */
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

static const char *blankless(const char *p, const char *end) {
    while (p < end && *p == ' ') p++;
    return p;
}

static int same_meta(file *a, file *b) {
    const char *p = a->meta, *q = b->meta, *pe = p + a->meta_len, *qe = q + b->meta_len;
    blank(a);
    blank(b);
    for (;; p++, q++) {
        p = blankless(p, pe);
        q = blankless(q, qe);
        if (p == pe || q == qe) return p == pe && q == qe;
        if (*p != *q) {
            printf("metadata differ: %.60s and %.60s; ", p, q);
            return 0;
        }
    }
}

/* sums over a list, and its worst tensor */
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

static double norm(const apart *s) {
    return s->nan ? (double)NAN : s->diff2 > 0 ? sqrt(s->diff2 / s->size2) : 0;
}

static int begins(const char *s, const char *with) {
    return !strncmp(s, with, strlen(with));
}

static int of_state(const char *name) {
    if (begins(name, "arch.")) name += 5;
    return begins(name, "memory.") || begins(name, "state.") || begins(name, "optim.")
           || begins(name, "grads");
}

/* The next line with a loss, of a step or an evaluation: its event, step and loss, and
   the line. 0: there is none */
static int next_loss(char **at, char *event, double *step, double *loss, char **whole) {
    char *line;
    while ((line = *at) != NULL && *line) {
        char *end = strchr(line, '\n'), *e, *s, *l;
        *at = end ? end + 1 : NULL;
        if (end) *end = 0;
        e = strstr(line, "\"event\":\"");
        s = strstr(line, "\"step\":");
        l = strstr(line, "\"loss\":");
        if (!e || !s || !l || !(begins(e + 9, "train\"") || begins(e + 9, "eval\""))) continue;
        *event = e[9];
        *step = strtod(s + 7, NULL);
        *loss = strtod(l + 7, NULL);
        *whole = line;
        return 1;
    }
    return 0;
}

/* Are all figures of two lines alike, but for those of the clock and the memory? Lists
   have four digits: to 0.2 %. The share that compression loses (train_compressive's
   "ratio") is, with --batch-split, the mean of the parts' shares, and ranks do not
   have those: to 5 %. */
static int same_figures(char *p, char *q) {
    double within = 2e-3;
    static const char *const skip[] = {"\"tokens_per_s\":", "\"seconds\":", "\"peak_bytes\":"};
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

int main(int argc, char **argv) {
    static file a, b;
    apart params = {0, 0, 0, "", 0, 0}, state = {0, 0, 0, "", 0, 0};
    double limit[3], losses = 0;
    size_t i, n, lines = 0;
    int bad = 0, told = 0;
    char *x, *y;
    if (argc != 8)
        stop("usage: group_cmp LOSS PARAMS STATE A.safetensors B.safetensors A.jsonl B.jsonl");
    for (i = 0; i < 3; i++) limit[i] = strtod(argv[1 + i], NULL);
    load(&a, argv[4]);
    load(&b, argv[5]);
    if (!same_meta(&a, &b)) bad = 1;
    if (a.count != b.count)
        stop("%lu tensors and %lu", (unsigned long)a.count, (unsigned long)b.count);
    for (i = 0; i < a.count; i++) {
        const tensor *t = &a.t[i], *u = &b.t[i];
        if (strcmp(t->name, u->name) || strcmp(t->shape, u->shape) || t->is_float != u->is_float
            || t->bytes != u->bytes)
            stop("%s %s and %s %s", t->name, t->shape, u->name, u->shape);
        if (t->is_float)
            add(of_state(t->name) ? &state : &params, t, u);
        else if (memcmp(t->data, u->data, t->bytes)) {
            printf("%s differs; ", t->name);
            bad = 1;
        }
    }
    x = read_all(argv[6], &n);
    y = read_all(argv[7], &n);
    for (;;) {
        char e = 0, f = 0;
        char *u = NULL, *v = NULL;
        double s = 0, t = 0, l = 0, m = 0, d;
        int more = next_loss(&x, &e, &s, &l, &u);
        if (more != next_loss(&y, &f, &t, &m, &v) || e != f || s < t || s > t) {
            printf("the logs have other lines at step %g; ", s);
            bad = 1;
            break;
        }
        if (!more) break;
        if (!same_figures(u, v)) {
            if (!told++) printf("figures differ: %.300s; ", u);
            bad = 1;
        }
        d = fabs(l - m) / fabs(l);
        if (!(d <= losses)) losses = d;
        if (!(d <= limit[0])) bad = 1;
        lines++;
    }
    if (!(norm(&params) <= limit[1]) || !(params.worst <= 30 * limit[1])
        || !(state.worst <= limit[2]) || state.nan)
        bad = 1;
    if (!lines || !params.tensors || !state.tensors) {
        printf("nothing to compare; ");
        bad = 1;
    }
    printf("%lu losses %.1e, parameters %.1e (%s %.1e), state %.1e (%s)\n", (unsigned long)lines,
           losses, norm(&params), params.name, params.worst, state.worst, state.name);
    return bad;
}
