/* test_cuda_comp.c - the Compressive Transformer on a GPU: its CUDA kernels compared
   with the CPU kernels, with odd sizes, misaligned arrays, guard elements around them,
   and several thread orders; small models with every option, trained on both devices;
   replayed steps; generation. "short" omits the large cases. */
#include "../../seqtx_compressive.h"
#include "cuda_arr.h"

static int brief; /* whether "short" was given, as with sanitizers, which are slow */

static const int32_t marks[] = {1, -1, 1 << 30, 2};


// >>groups

typedef struct grouped {
    stx_comp_groups c, d;
    int32_t *first, *pad, *dfirst, *dpad;
} grouped;

/* Chooses the groups of a case. Bit 0 of `how` selects separate first rows for the
   streams; how >> 1 is 0 if no row is missing, 1 if some are, and 2 if all are. There
   may be gaps between streams. */
static void grouped_make(grouped *t, size_t B, size_t rows, size_t groups, size_t taps, size_t step,
                         size_t D, ptrdiff_t at, int how) {
    size_t b, i;
    memset(t, 0, sizeof *t);
    t->c.B = B;
    t->c.rows = rows;
    t->c.groups = groups;
    t->c.taps = taps;
    t->c.step = step;
    t->c.D = D;
    t->c.at = at;
    t->first = (int32_t *)calloc(B + 1, sizeof *t->first);
    t->pad = (int32_t *)calloc(B * rows + 1, sizeof *t->pad);
    for (b = 0; b < B; b++) {
        double u = (test_rand() + 1) / 2, first = floor(u * (double)(rows + 1));
        if (b % 3 == 1) first = 0;
        if (b % 3 == 2) first = (double)rows;
        t->first[b] = (int32_t)STX_MIN(first, (double)rows);
        for (i = 0; i < rows; i++)
            t->pad[b * rows + i] = how / 2 == 2 || test_rand() > 0.4 ? marks[i % 4] : 0;
    }
    if ((rows + D + step) % 3) t->c.stride = rows * D + ((rows + D + step) % 3 == 1 ? 4 : D + 1);
    t->d = t->c;
    t->dfirst = (int32_t *)cuda_bytes(gx, t->first, B * sizeof *t->first);
    t->dpad = (int32_t *)cuda_bytes(gx, t->pad, B * rows * sizeof *t->pad);
    if (how % 2) {
        t->c.first = t->first;
        t->d.first = t->dfirst;
    }
    if (how / 2) {
        t->c.pad = t->pad;
        t->d.pad = t->dpad;
    }
}

static void grouped_free(grouped *t) {
    free(t->first);
    free(t->pad);
    stx_cuda_free(gx, t->dfirst);
    stx_cuda_free(gx, t->dpad);
}

static size_t stride_of(const grouped *t) {
    return t->c.stride ? t->c.stride : t->c.rows * t->c.D;
}

/* Returns the rows of the streams. Missing rows and gaps are NaN and must not be read. */
static arr rows_of(const grouped *t) {
    const size_t ld = stride_of(t), w = t->c.rows * t->c.D;
    arr a = arr_of(t->c.B * ld, 2, 0, N_);
    size_t n, i;
    for (n = 0; n < a.n; n++) {
        size_t b = ld ? n / ld : 0, row = n - b * ld < w ? (n - b * ld) / t->c.D : SIZE_MAX;
        if (row == SIZE_MAX || (t->c.pad && t->pad[b * t->c.rows + row])
            || (t->c.first && (int32_t)row < t->first[b]))
            a.c[n] = NAN;
    }
    for (i = 0; i < t->c.B && t->c.stride; i++)
        CHECK(isnan((double)a.c[i * ld + w]), "expected a gap after stream %zu", i);
    arr_upload(&a);
    return a;
}

/* Checks that the CPU kernel computes the same n results y from rows without gaps.
   kernel: 0 unfold, 1 mean, 2 max, 3 pick. */
static void dense_check(const char *name, const grouped *t, const arr *rows, const arr *u,
                        size_t ldu, const float *y, size_t n, int kernel) {
    const size_t w = t->c.rows * t->c.D;
    float *r = (float *)malloc((t->c.B * w + 1) * sizeof *r),
          *z = (float *)malloc((n + 1) * sizeof *z);
    stx_comp_groups g = t->c;
    size_t b;
    for (b = 0; b < g.B; b++) memcpy(r + b * w, rows->c + b * stride_of(t), w * sizeof *r);
    g.stride = 0;
    if (kernel == 0) stx_comp_unfold(cx, z, r, &g, 0);
    if (kernel == 1 || kernel == 2) stx_comp_pool(cx, z, r, &g, kernel == 2);
    if (kernel == 3) stx_comp_pick(cx, z, r, u->c, ldu, &g);
    if (half) cuda_round(z, n); /* because arr_check rounds y */
    CHECK(!memcmp(y, z, n * sizeof *z), "%s: rows without gaps give another result", name);
    free(r);
    free(z);
}

typedef struct group_case {
    size_t B, rows, groups, taps, step, D;
    ptrdiff_t at;
    int how;
} group_case;

static group_case group_case_of(size_t n) {
    static const size_t wide[] = {1, 3, 4, 31, 32, 33, 36, 127, 128, 132},
                        long_[] = {0, 1, 2, 5, 31, 33, 67}, tap[] = {1, 2, 3, 4, 7};
    group_case c;
    c.D = wide[n % COUNT(wide)];
    c.rows = long_[n % COUNT(long_)];
    c.taps = tap[n % COUNT(tap)];
    c.step = 1 + n / 2 % 5;
    c.B = 1 + n % 3;
    c.groups = n % 13 == 7 ? 1 : (c.rows + c.step - 1) / c.step;
    c.at = n % 13 == 7 ? 2 : -(ptrdiff_t)(n / 3 % 4);
    c.how = (int)(n / 2 % 6);
    return c;
}

static void test_groups(void) {
    size_t n;
    char name[128];
    for (n = 0; n < (brief ? 40 : 210); n++) {
        const group_case c = group_case_of(n);
        const size_t means = c.B * c.groups * c.D, taps = means * c.taps;
        int k;
        grouped t;
        arr rows_, y, taps_, back;
        grouped_make(&t, c.B, c.rows, c.groups, c.taps, c.step, c.D, c.at, c.how);
        rows_ = rows_of(&t);
        y = arr_of(taps, 2, 0, N_);
        for (k = 0; k < 2; k++) {
            snprintf(name, sizeof name,
                     "%s B %zu rows %zu groups %zu taps %zu step %zu D %zu at %td how %d",
                     k ? "unfold +" : "unfold", c.B, c.rows, c.groups, c.taps, c.step, c.D, c.at,
                     c.how);
            BOTH(stx_comp_unfold, (cx, y.c, rows_.c, &t.c, k), (gx, y.d, rows_.d, &t.d, k));
            arr_check(name, &y, 0);
            if (!k) dense_check(name, &t, &rows_, NULL, 0, y.c, taps, 0);
        }
        taps_ = arr_of(taps, 2, 0, N_);
        back = arr_of(c.B * c.rows * c.D, 1, 0, N_);
        memcpy(name, "fold  ", 6);
        BOTH(stx_comp_fold, (cx, back.c, taps_.c, &t.c), (gx, back.d, taps_.d, &t.d));
        arr_check(name, &back, 0);
        arr_free(&y);
        y = arr_of(means, 2, 0, N_);
        for (k = 0; k < 2; k++) {
            memcpy(name, k ? "max   " : "mean  ", 6);
            BOTH(stx_comp_pool, (cx, y.c, rows_.c, &t.c, k), (gx, y.d, rows_.d, &t.d, k));
            arr_check(name, &y, 0);
            dense_check(name, &t, &rows_, NULL, 0, y.c, means, 1 + k);
        }
        arr_check("rows", &rows_, 0);
        arr_check("taps", &taps_, 0);
        arr_free(&rows_);
        arr_free(&y);
        arr_free(&taps_);
        arr_free(&back);
        grouped_free(&t);
    }
}

/* NaN and infinities must be pooled as on the CPU. */
static void test_pool_nan(void) {
    static const float v[] = {NAN,      1,         2, 1,         NAN,       3,
                              INFINITY, -INFINITY, 1, -INFINITY, -INFINITY, -INFINITY,
                              0,        -0.0f,     1, 5,         4,         NAN};
    arr rows_ = arr_from(v, 18, N_), y = arr_of(6, 1, 0, N_);
    grouped t;
    int k;
    grouped_make(&t, 1, 18, 6, 3, 3, 1, 0, 0);
    t.c.stride = t.d.stride = 0;
    for (k = 0; k < 2; k++) {
        BOTH(stx_comp_pool, (cx, y.c, rows_.c, &t.c, k), (gx, y.d, rows_.d, &t.d, k));
        arr_check("pool of NaN", &y, 0);
    }
    arr_free(&rows_);
    arr_free(&y);
    grouped_free(&t);
}

static void test_pick(void) {
    static const size_t long_[] = {0, 1, 4, 31, 32, 33, 64, 67, 255, 257, 520};
    size_t n, i;
    char name[128];
    for (n = 0; n < (brief ? 30 : 88); n++) {
        size_t rows = long_[n % COUNT(long_)], D = n % 4 ? 3 + n % 4 : 36, step = 1 + n / 3 % 5,
               B = 1 + n % 3, ldu = 2 * rows + n % 3;
        size_t groups = (rows + step - 1) / step;
        int how = (int)(n / 2 % 6);
        grouped t;
        /* small integers, many of which are equal */
        arr rows_, y, u = arr_of(B * ldu + 1, n % 5 == 4 ? 0.4 : 3, n % 5 != 0, B_);
        grouped_make(&t, B, rows, groups, 1, step, D, 0, how);
        rows_ = rows_of(&t);
        y = arr_of(B * groups * D, 2, 0, N_);
        for (i = 0; i < u.n; i++) u.c[i] = (float)fabs((double)u.c[i]);
        if (n % 7 == 3 && rows > 4) u.c[2 * (rows / 2)] = u.c[2 * (rows / 3)] = NAN;
        arr_upload(&u);
        BOTH(stx_comp_pick, (cx, y.c, rows_.c, u.c, ldu, &t.c), (gx, y.d, rows_.d, u.d, ldu, &t.d));
        snprintf(name, sizeof name, "pick B %zu rows %zu groups %zu step %zu D %zu how %d", B, rows,
                 groups, step, D, how);
        arr_check(name, &y, 0);
        dense_check(name, &t, &rows_, &u, ldu, y.c, B * groups * D, 3);
        arr_check("usage", &u, 0);
        arr_check("rows", &rows_, 0);
        arr_free(&rows_);
        arr_free(&y);
        arr_free(&u);
        grouped_free(&t);
    }
}


// >>usage

/* A case in which the usage of the keys first .. first + n - 1 is counted. pad: 0: no
   key is padded; 1: some keys are; 2: in addition, all keys of stream 0 are. */
typedef struct looked {
    size_t B, T, S, H, D, first, n;
    int pe, u, pad, dmin;
    size_t span, extra;
} looked;

/* The arrays and arguments of an attention call and of the usage of its keys, for both
   devices. */
typedef struct usage_run {
    const looked *s;
    size_t ldq, ldk, ldu, P;
    arr q, kv, y, pe, u, v, usage, top, inv;
    int32_t *pad, *dpad;
    stx_attention_args c, d;
} usage_run;

static int usage_pad(const looked *s, size_t b, size_t j) {
    if (s->pad == 2 && b == 0) return 1;
    return test_rand() > 0.5 || j % 7 == b ? marks[j % 4] : 0;
}

/* Makes padded keys and queries NaN. */
static void usage_padding(usage_run *r) {
    const looked *s = r->s;
    size_t b, j, i;
    r->pad = (int32_t *)calloc(s->B * (s->S + 1), sizeof *r->pad);
    for (b = 0; b < s->B; b++)
        for (j = 0; s->pad && j < s->S; j++) {
            const int is_query = j + s->T >= s->S;
            r->pad[b * (s->S + 1) + j] = usage_pad(s, b, j);
            if (!r->pad[b * (s->S + 1) + j]) continue;
            for (i = 0; i < r->ldk; i++) r->kv.c[(b * s->S + j) * r->ldk + i] = NAN;
            for (i = 0; is_query && i < r->ldq; i++)
                r->q.c[(b * s->T + j + s->T - s->S) * r->ldq + i] = NAN;
        }
    arr_upload(&r->q);
    arr_upload(&r->kv);
    r->dpad = (int32_t *)cuda_bytes(gx, r->pad, s->B * (s->S + 1) * sizeof *r->pad);
}

/* Sets the arrays and arguments for both devices. */
static void usage_args(usage_run *r) {
    const looked *s = r->s;
    const size_t C = s->H * s->D;
    stx_attention_args *c = &r->c, *d = &r->d;
    memset(c, 0, sizeof *c);
    c->B = s->B;
    c->T = s->T;
    c->S = s->S;
    c->H = s->H;
    c->D = s->D;
    c->P = r->P;
    c->pe_heads = s->pe == 1 ? 1 : (int)s->H;
    c->q_row_stride = r->ldq;
    c->kv_row_stride = r->ldk;
    c->q_batch_stride = s->T * r->ldq;
    c->kv_batch_stride = s->S * r->ldk;
    c->span = s->span ? s->span : s->S;
    c->delta_min = s->dmin;
    c->scale = (stx_real)(1 / sqrt((double)s->D));
    c->pad_batch_stride = s->S + 1;
    *d = *c;
    c->q = r->q.c;
    c->k = r->kv.c;
    c->v = r->kv.c + C;
    c->pe = r->P ? r->pe.c : NULL;
    c->content_bias = s->u ? r->u.c : NULL;
    c->position_bias = s->u && r->P ? r->v.c : NULL;
    c->pad = s->pad ? r->pad : NULL;
    c->y = r->y.c;
    c->row_max = r->top.c;
    c->inv_sum = r->inv.c;
    d->q = r->q.d;
    d->k = r->kv.d;
    d->v = stx_offset_ptr(gx, r->kv.d, C);
    d->pe = r->P ? r->pe.d : NULL;
    d->content_bias = s->u ? r->u.d : NULL;
    d->position_bias = s->u && r->P ? r->v.d : NULL;
    d->pad = s->pad ? r->dpad : NULL;
    d->y = r->y.d;
    d->row_max = r->top.d;
    d->inv_sum = r->inv.d;
}

static void usage_make(usage_run *r, const looked *s) {
    const size_t C = s->H * s->D, rows = s->B * s->H * s->T;
    memset(r, 0, sizeof *r);
    r->s = s;
    r->P = s->pe ? s->S + s->extra : 0;
    r->ldq = C + (off ? 3 : 0);
    r->ldk = 2 * C;
    r->ldu = 2 * s->n + 2 * (s->D % 3);
    r->q = arr_of(s->B * s->T * r->ldq, 1, 0, N_);
    r->kv = arr_of(s->B * s->S * r->ldk, 1, 0, N_);
    r->y = arr_of(s->B * s->T * C, 1, 0, N_);
    r->pe = arr_of(r->P * (s->pe == 1 ? s->D : C), 1, 0, P_);
    r->u = arr_of(C, 0.5, 0, P_);
    r->v = arr_of(C, 0.5, 0, P_);
    r->usage = arr_of(s->B * r->ldu + 1, 1, 0, B_);
    r->top = arr_of(rows, 1, 0, B_);
    r->inv = arr_of(rows, 1, 0, B_);
    /* attention reads bf16 copies of parameters */
    cuda_round(r->pe.c, r->pe.n);
    cuda_round(r->u.c, C);
    cuda_round(r->v.c, C);
    arr_upload(&r->pe);
    arr_upload(&r->u);
    arr_upload(&r->v);
    usage_padding(r);
    usage_args(r);
}

static void usage_free(usage_run *r) {
    arr_free(&r->q);
    arr_free(&r->kv);
    arr_free(&r->pe);
    arr_free(&r->u);
    arr_free(&r->v);
    arr_free(&r->y);
    arr_free(&r->usage);
    arr_free(&r->top);
    arr_free(&r->inv);
    stx_cuda_free(gx, r->dpad);
    free(r->pad);
}

/* Runs attention on both devices, then counts the usage of its keys. version: see
   stx_cuda_attention. */
static void usage_both(usage_run *r, int version) {
    const looked *s = r->s;
    r->c.work = malloc(stx_attention_work(cx, &r->c, 0) + 1);
    stx_attention_fwd(cx, &r->c);
    free(r->c.work);
    stx_comp_usage(cx, r->usage.c, r->ldu, &r->c, s->first, s->n);
    stx_cuda_attention(gx, version);
    r->d.work = stx_cuda_alloc(gx, stx_attention_work_cuda(gx, &r->d, 0) + 1, STX_MEM_BYTES);
    stx_attention_fwd_cuda(gx, &r->d);
    stx_comp_usage_cuda(gx, r->usage.d, r->ldu, &r->d, s->first, s->n);
    stx_cuda_free(gx, r->d.work);
    stx_cuda_attention(gx, 0);
}

/* Compares the GPU's usage with the definition. was: the usage before the call; sum
   (B,n): the increase by the definition. */
static void usage_check(const usage_run *r, const float *was, const double *sum, int version) {
    const looked *s = r->s;
    float *got = arr_get(&r->usage);
    double worst = 0, top = 1e-3;
    size_t b, i, j;
    for (b = 0; b < s->B; b++) {
        size_t queries = 0;
        for (i = 0; i < s->T; i++)
            queries += !(s->pad && r->pad[b * (s->S + 1) + s->S - s->T + i]);
        for (j = 0; j < s->n; j++) {
            const float *g = got + b * r->ldu + 2 * j, *w = was + b * r->ldu + 2 * j;
            double expected = sum[b * s->n + j];
            if (expected > top) top = expected;
            raise_worst(&worst, fabs((double)g[0] - (double)w[0] - expected));
            CHECK(CLOSE((double)g[1] - (double)w[1], (double)queries, 1e-6),
                  "usage: key %zu of %g queries", j, (double)g[1]);
        }
    }
    CHECK(worst <= (half ? 1e-2 : 1e-5) * STX_MAX(top, 1),
          "usage B %zu T %zu S %zu H %zu D %zu first %zu n %zu pe %d u %d pad %d version %d: error "
          "%g of %g",
          s->B, s->T, s->S, s->H, s->D, s->first, s->n, s->pe, s->u, s->pad, version, worst, top);
    free(got);
}

static void compare_usage(const looked *s, int version) {
    usage_run r;
    float *was;
    double *sum = (double *)calloc(s->B * s->n + 1, sizeof *sum), *work;
    usage_make(&r, s);
    work = (double *)malloc((2 * stx_attention_keys(&r.c) + 1) * sizeof *work);
    stx_comp_usage_plain(sum, &r.c, s->first, s->n, work);
    was = (float *)malloc((r.usage.n + 1) * sizeof *was);
    memcpy(was, r.usage.c, r.usage.n * sizeof *was);
    usage_both(&r, version);
    usage_check(&r, was, sum, version);
    least = 1;
    arr_check("usage against the CPU's", &r.usage, half ? 1e-2 : 1e-5);
    least = 0;
    arr_check("usage q", &r.q, 0);
    arr_check("usage kv", &r.kv, 0);
    usage_free(&r);
    free(sum);
    free(work);
    free(was);
}

static void test_usage(void) {
    static const looked s[] = {
        {1, 1, 2, 1, 8, 0, 1, 0, 0, 0, 0, 0, 0},     {2, 5, 12, 2, 8, 3, 4, 2, 0, 0, 0, 0, 0},
        {2, 33, 66, 2, 16, 0, 33, 2, 1, 1, 0, 0, 5}, {1, 64, 192, 1, 32, 63, 65, 2, 0, 0, 0, 0, 0},
        {3, 7, 31, 3, 10, 2, 22, 1, 1, 1, 0, 0, 1},  {2, 65, 200, 2, 24, 5, 129, 0, 1, 2, 0, 0, 0},
        {1, 1, 70, 2, 16, 4, 60, 2, 1, 1, 0, 0, 3},  {2, 67, 140, 1, 40, 0, 73, 2, 0, 1, 0, 0, 0},
        {1, 31, 70, 2, 8, 1, 38, 2, 0, 0, 1, 40, 0}, {2, 3, 5, 1, 3, 0, 2, 2, 1, 0, 0, 0, 2}};
    size_t k;
    for (k = 0; k < COUNT(s); k++) {
        compare_usage(s + k, 0);
        if (k < 4) compare_usage(s + k, 1);
    }
}


// >>error

static void test_errors(void) {
    static const size_t rows[] = {0, 1, 2, 7, 31, 33, 300, 1100},
                        wide[] = {1, 3, 4, 31, 33, 128, 260};
    size_t n, i;
    for (n = 0; n < (brief ? 14 : 56); n++) {
        size_t N = rows[n % COUNT(rows)], C = wide[n % COUNT(wide)];
        int whole = n % 3 == 1, skipped = (int)(n / 2 % 3);
        arr a = arr_of(N * C, 3, whole, N_), t = arr_of(N * C, 3, whole, N_),
            loss = arr_of(1, 1, 0, B_), rel_error = arr_of(1, 1, 0, B_);
        arr da = arr_of(N * C, 1, 0, N_), dloss = arr_of(1, 2, 0, B_);
        int32_t *skip = (int32_t *)calloc(N + 1, sizeof *skip), *dskip;
        double *work = (double *)calloc(2 * N + 1, sizeof *work),
               *got = (double *)calloc(2 * N + 1, sizeof *got), *dwork;
        stx_comp_error_args c, d;
        size_t bad = 0;
        for (i = 0; i < N; i++)
            if (skipped == 2 || (skipped && test_rand() > 0)) {
                skip[i] = marks[i % 4];
                a.c[i * C] = t.c[i * C + C - 1] = NAN;
            }
        if (skipped) {
            arr_upload(&a);
            arr_upload(&t);
        }
        dskip = (int32_t *)cuda_bytes(gx, skip, N * sizeof *skip);
        dwork = (double *)cuda_bytes(gx, work, 2 * N * sizeof *work);
        memset(&c, 0, sizeof c);
        c.N = N;
        c.D = C;
        c.count = whole ? 64 : 0.7 * (double)(N * C + 1);
        d = c;
        c.a = a.c;
        c.target = t.c;
        c.skip = skipped ? skip : NULL;
        c.loss = loss.c;
        c.rel_error = rel_error.c;
        c.work = work;
        c.dloss = dloss.c;
        c.da = da.c;
        d.a = a.d;
        d.target = t.d;
        d.skip = skipped ? dskip : NULL;
        d.loss = loss.d;
        d.rel_error = rel_error.d;
        d.work = dwork;
        d.dloss = dloss.d;
        d.da = da.d;
        BOTH(stx_comp_error_fwd, (cx, &c), (gx, &d));
        arr_check("error loss", &loss, whole ? 0 : 1e-6);
        arr_check("relative error", &rel_error, whole ? 0 : 1e-6);
        if (N) stx_cuda_download(gx, got, dwork, 2 * N * sizeof *work);
        for (i = 0; i < 2 * N; i++)
            bad += !(fabs(got[i] - work[i]) <= (whole ? 0 : 1e-13) * work[i]);
        CHECK(!bad, "error: sums of %zu rows differ, N %zu C %zu", bad, N, C);
        for (i = 0; i < 2; i++) {
            c.accumulate = d.accumulate = !i;
            BOTH(stx_comp_error_bwd, (cx, &c), (gx, &d));
            arr_check(i ? "error da, overwritten" : "error da", &da, 1e-6);
        }
        for (i = 0; i < N; i++)
            CHECK(!skip[i] || !C || da.c[i * C] == 0, "error da: skipped row %zu has a gradient",
                  i);
        arr_check("error da", &da, 1e-6);
        arr_check("error a", &a, 0);
        arr_check("error t", &t, 0);
        arr_free(&a);
        arr_free(&t);
        arr_free(&loss);
        arr_free(&rel_error);
        arr_free(&da);
        arr_free(&dloss);
        stx_cuda_free(gx, dskip);
        stx_cuda_free(gx, dwork);
        free(skip);
        free(work);
        free(got);
    }
}


// >>gates

enum { PLANES = 6 }; /* x, y, p0 .. p3 */

/* Returns a bit mask of the planes that this kind of gate reads. */
static int planes_of(int kind) {
    switch (kind) {
    case STX_COMP_GATE_GTRXL: return 61;
    case STX_COMP_GATE_GRU:
    case STX_COMP_GATE_SIGTANH:
    case STX_COMP_GATE_RESET: return 13;
    case STX_COMP_GATE_MOGRIFY: return 5;
    case STX_COMP_GATE_GLU: return 4;
    default: return 7;
    }
}

/* Returns the number of plane i's elements per element of x. */
static size_t plane_size(int kind, int i) {
    if (i > 1 && kind == STX_COMP_GATE_GRU) return 3;
    return i > 1 && kind == STX_COMP_GATE_GLU ? 2 : 1;
}

typedef struct gate {
    int kind;
    size_t N, D;
    arr in[PLANES], grad[PLANES], out, dout, db[2];
    stx_comp_gate_args c, d;
} gate;

/* Makes some logits infinite. The values that a gate multiplies by a sigmoid stay finite:
   whether infinity is multiplied by 0 would depend on where the sigmoid underflows. */
static void gate_extremes(arr *a, int kind, int i) {
    size_t j;
    if (kind != STX_COMP_GATE_GLU && (i == 2 || (i > 2 && kind != STX_COMP_GATE_GRU)))
        for (j = 0; j < a->n; j += 7) a->c[j] = j % 3 ? (float)INFINITY : -(float)INFINITY;
    if (a->n > 20) a->c[a->n / 2] = NAN;
    arr_upload(a);
}

/* Creates the arrays of a gate. Elements of the planes p are in (-most, most); if most
   is above 50, some are extreme. */
static void gate_make(gate *t, int kind, size_t N, size_t D, double most) {
    int i;
    memset(t, 0, sizeof *t);
    t->kind = t->c.kind = kind;
    t->N = t->c.N = N;
    t->D = t->c.D = D;
    t->out = arr_of(N * D, 1, 0, N_);
    t->dout = arr_of(N * D, 1, 0, N_);
    t->d = t->c;
    for (i = 0; i < PLANES; i++) {
        size_t n = plane_size(kind, i) * N * D;
        t->in[i] = arr_of(n, i > 1 ? most : 1, 0, N_);
        t->grad[i] = arr_of(n, 1, 0, N_);
        if (most > 50) gate_extremes(&t->in[i], kind, i);
    }
    i = planes_of(kind);
    if (i & 1) {
        t->c.x = t->in[0].c;
        t->d.x = t->in[0].d;
        t->c.dx = t->grad[0].c;
        t->d.dx = t->grad[0].d;
    }
    if (i & 2) {
        t->c.y = t->in[1].c;
        t->d.y = t->in[1].d;
        t->c.dy = t->grad[1].c;
        t->d.dy = t->grad[1].d;
    }
    for (i = 2; i < PLANES; i++)
        if (planes_of(kind) >> i & 1) {
            t->c.p[i - 2] = t->in[i].c;
            t->d.p[i - 2] = t->in[i].d;
            t->c.dp[i - 2] = t->grad[i].c;
            t->d.dp[i - 2] = t->grad[i].d;
        }
    for (i = 0; i < 2; i++) t->db[i] = arr_of((kind == STX_COMP_GATE_GRU ? 3 : 2) * D, 1, 0, B_);
    t->c.out = t->out.c;
    t->d.out = t->out.d;
    t->c.dout = t->dout.c;
    t->d.dout = t->dout.d;
}

static void gate_free(gate *t) {
    int i;
    for (i = 0; i < PLANES; i++) {
        arr_free(t->in + i);
        arr_free(t->grad + i);
    }
    arr_free(&t->out);
    arr_free(&t->dout);
    arr_free(&t->db[0]);
    arr_free(&t->db[1]);
}

static double gate_most(size_t n) {
    if (n % 5 == 3) return 100;
    return n % 5 == 1 ? 12 : 2;
}

static const size_t gate_wide[] = {1, 3, 4, 31, 36, 64, 67, 260};

static void test_gates(void) {
    static const size_t rows[] = {0, 1, 2, 5, 17};
    int kind, k;
    size_t n, i;
    char name[96];
    for (kind = STX_COMP_GATE_GRU; kind <= STX_COMP_GATE_GLU; kind++)
        for (n = 0; n < (brief ? 4 : 20); n++) {
            gate t;
            double most = gate_most(n);
            gate_make(&t, kind, rows[n % COUNT(rows)], gate_wide[n % COUNT(gate_wide)], most);
            BOTH(stx_comp_gate_fwd, (cx, &t.c), (gx, &t.d));
            /* the far tail of GELU, for which the two devices use different formulas */
            least = kind == STX_COMP_GATE_GLU ? 1e-6 : 0;
            snprintf(name, sizeof name, "gate %d, N %zu D %zu, values to %g", kind, t.N, t.D, most);
            arr_check(name, &t.out, 2e-6);
            for (k = 0; k < 2; k++) {
                t.c.accumulate = t.d.accumulate = k;
                BOTH(stx_comp_gate_bwd, (cx, &t.c), (gx, &t.d));
                for (i = 0; i < PLANES; i++) {
                    snprintf(name, sizeof name,
                             "gate %d, N %zu D %zu, values to %g, gradient %zu%s", kind, t.N, t.D,
                             most, i, k ? " +" : "");
                    arr_check(name, t.grad + i, 5e-6);
                }
            }
            for (i = 0; i < PLANES; i++) arr_check("input of a gate", t.in + i, 0);
            least = 0;
            gate_free(&t);
        }
}

/* Tests the backward pass with bias gradients. */
static void test_gate_biases(void) {
    static const size_t many[] = {1, 7, 64, 65, 150, 0};
    size_t n, i;
    char name[96];
    for (n = 0; n < 26; n++) {
        gate t;
        int kind = n % 2 ? STX_COMP_GATE_GLU : STX_COMP_GATE_GRU;
        gate_make(&t, kind, many[n % COUNT(many)],
                  gate_wide[n < 24 ? (n / 2 + n / 6) % COUNT(gate_wide) : 5], 2);
        if (n >= 24) { /* a float gradient in bf16 */
            arr_free(&t.dout);
            t.dout = arr_of(t.N * t.D, 1, 0, B_);
            t.c.dout = t.dout.c;
            t.d.dout = t.dout.d;
        }
        t.c.db[0] = t.db[0].c;
        t.d.db[0] = t.db[0].d;
        if (kind == STX_COMP_GATE_GRU && n % 3) {
            t.c.db[1] = t.db[1].c;
            t.d.db[1] = t.db[1].d;
        }
        BOTH(stx_comp_gate_bwd, (cx, &t.c), (gx, &t.d));
        for (i = 0; i < PLANES + 2; i++) {
            snprintf(name, sizeof name, "gate %d, N %zu D %zu, biases, gradient %zu", kind, t.N,
                     t.D, i);
            arr_check(name, i < PLANES ? t.grad + i : t.db + (i - PLANES), 5e-6);
        }
        gate_free(&t);
    }
}


// >>repeatability

static void groups_bits(uint64_t *h) {
    int i;
    for (i = 0; i < 2; i++) {
        size_t rows = i ? 37 : 300, groups = (rows + 3) / 4, D = i ? 33 : 36;
        grouped t;
        arr r, y, z, used;
        grouped_make(&t, 3, rows, groups, 5, 4, D, -1, 3);
        r = rows_of(&t);
        y = arr_of(3 * groups * 5 * D, 1, 0, N_);
        z = arr_of(3 * groups * D, 1, 0, N_);
        used = arr_of(3 * rows * 2, 4, 1, B_);
        stx_comp_pick_cuda(gx, z.d, r.d, used.d, 2 * rows, &t.d);
        *h = cuda_hash(gx, z.d, z.n, *h);
        stx_comp_pool_cuda(gx, z.d, r.d, &t.d, i);
        *h = cuda_hash(gx, z.d, z.n, *h);
        stx_comp_fold_cuda(gx, r.d, y.d, &t.d);
        *h = cuda_hash(gx, r.d, r.n, *h);
        stx_comp_unfold_cuda(gx, y.d, r.d, &t.d, 1);
        *h = cuda_hash(gx, y.d, y.n, *h);
        arr_free(&r);
        arr_free(&y);
        arr_free(&z);
        arr_free(&used);
        grouped_free(&t);
    }
}

static void usage_bits(uint64_t *h) {
    enum { B = 2, T = 70, S = 210, H = 2, D = 24, C = H * D };

    stx_attention_args a;
    stx_comp_error_args error;
    arr q = arr_of(B * T * C, 1, 0, N_), k = arr_of(B * S * C, 1, 0, N_),
        pe = arr_of(S * C, 1, 0, P_);
    arr usage = arr_of(2 * B * S, 1, 0, B_), stat = arr_of(B * H * T, 1, 0, B_);
    arr e = arr_of(B * T * C, 1, 0, N_), loss = arr_of(3, 1, 0, B_);
    double *work = (double *)stx_cuda_alloc(gx, 2 * B * T * sizeof *work, STX_MEM_BYTES);
    memset(&a, 0, sizeof a);
    a.B = B;
    a.T = T;
    a.S = S;
    a.H = H;
    a.D = D;
    a.P = S;
    a.pe_heads = H;
    a.q_row_stride = a.kv_row_stride = C;
    a.q_batch_stride = T * C;
    a.kv_batch_stride = S * C;
    a.span = S;
    a.scale = (stx_real)0.2;
    a.q = q.d;
    a.k = k.d;
    a.pe = pe.d;
    a.row_max = stat.d;
    a.inv_sum = stat.d;
    stx_comp_usage_cuda(gx, usage.d, 2 * S, &a, 1, S - T - 1);
    *h = cuda_hash(gx, usage.d, usage.n, *h);
    memset(&error, 0, sizeof error);
    error.N = B * T;
    error.D = C;
    error.count = 100;
    error.a = error.da = q.d;
    error.target = e.d;
    error.loss = loss.d;
    error.rel_error = stx_offset_ptr(gx, loss.d, 1);
    error.work = work;
    error.dloss = loss.d;
    error.accumulate = 1;
    stx_comp_error_fwd_cuda(gx, &error);
    stx_comp_error_bwd_cuda(gx, &error);
    *h = cuda_hash(gx, loss.d, 3, cuda_hash(gx, q.d, q.n, *h));
    arr_free(&q);
    arr_free(&k);
    arr_free(&pe);
    arr_free(&usage);
    arr_free(&stat);
    arr_free(&e);
    arr_free(&loss);
    stx_cuda_free(gx, work);
}

static void gate_bits(uint64_t *h) {
    int i, j;
    for (i = STX_COMP_GATE_GRU; i <= STX_COMP_GATE_GLU; i++) {
        gate g;
        gate_make(&g, i, 5, i % 2 ? 36 : 67, 3);
        stx_comp_gate_fwd_cuda(gx, &g.d);
        if (i == STX_COMP_GATE_GRU || i == STX_COMP_GATE_GLU) g.d.db[0] = g.db[0].d;
        stx_comp_gate_bwd_cuda(gx, &g.d);
        *h = cuda_hash(gx, g.db[0].d, g.db[0].n, *h);
        *h = cuda_hash(gx, g.out.d, g.out.n, *h);
        for (j = 0; j < PLANES; j++) *h = cuda_hash(gx, g.grad[j].d, g.grad[j].n, *h);
        gate_free(&g);
    }
}

static void bits(void *user, uint64_t *h) {
    (void)user;
    cuda_random_restart();
    gx = cuda_ctx(STX_CUDA, cuda_precision(half));
    groups_bits(h);
    usage_bits(h);
    gate_bits(h);
    CHECK(stx_ok(gx), "bits: %s", stx_error(gx));
    stx_destroy(gx);
}


// >>models

typedef struct model {
    stx_ctx *x;
    stx_comp *m;
    stx_optim *o;
    stx_comp_state *s;
    stx_ids *in, *out;
    size_t B, S, V;
    double loss;
} model;

enum { GRU, XL, USED, HIGHWAY, TIED, ERNIE, BPTT, ROTATE, PLAIN, CUSTOM, MODELS };

static const char *const model_names[MODELS] = {
    "gru, glu, convolution", "xl, dilated, gtrxl",
    "used, output",          "max, highway, norm after",
    "mean, sigtanh, tied",   "ernie, autoencoder, overlap, input",
    "mogrifier, bptt",       "rotate, dropout, recomputation",
    "no memory",             "custom"};

static size_t model_layers = 2;

/* A custom method: the sum of the group's rows, each multiplied by a gate. */
static size_t custom_weights(void *user, const stx_comp_desc *d, size_t l, stx_weight *w) {
    (void)user;
    (void)l;
    w[0].name = "gate.weight";
    w[0].rows = w[0].columns = d->dim;
    w[0].init = STX_NORMAL;
    w[0].a = 0.3;
    return 1;
}

static stx_tensor *custom_forward(stx_ctx *x, void *user, const stx_comp_evicted *e) {
    stx_tensor *rows = stx_linear(x, e->rows, e->w[0], NULL, STX_ACT_SIGMOID), *sum = NULL;
    size_t t;
    (void)user;
    rows = stx_reshape(x, stx_mul(x, rows, e->rows), e->B, e->G, e->taps * e->D, 0);
    for (t = 0; t < e->taps; t++) {
        stx_tensor *row = stx_slice_channels(x, rows, t * e->D, (t + 1) * e->D);
        sum = sum ? stx_add(x, sum, row) : row;
    }
    return sum;
}

static const stx_comp_method custom_method = {"gated", custom_weights, custom_forward, NULL,
                                              STX_COMP_ROWS_GROUPED};

static void model_options(stx_comp_desc *d, int which) {
    switch (which) {
    case GRU:
        d->gate = STX_COMP_GATE_GRU;
        d->glu = 1;
        break;
    case XL:
        d->positions = STX_COMP_POSITIONS_XL;
        d->compress = STX_COMP_COMPRESS_DILATED;
        d->gate = STX_COMP_GATE_GTRXL;
        d->gate_relu = 1;
        d->kv_heads = 1;
        break;
    case USED:
        d->compress = STX_COMP_COMPRESS_USED;
        d->gate = STX_COMP_GATE_OUTPUT;
        d->final_norm = 1;
        break;
    case HIGHWAY:
        d->compress = STX_COMP_COMPRESS_MAX;
        d->gate = STX_COMP_GATE_HIGHWAY;
        d->norm_after = 1;
        d->ratio = 3;
        break;
    case TIED:
        d->compress = STX_COMP_COMPRESS_MEAN;
        d->gate = STX_COMP_GATE_SIGTANH;
        d->tied = 1;
        d->emb = 20;
        d->mem = 6;
        break;
    case ERNIE:
        d->recurrence = STX_COMP_STORE_OUTPUT;
        d->aux = STX_COMP_AUX_AUTOENCODE;
        d->overlap = 2;
        d->gate = STX_COMP_GATE_INPUT;
        break;
    case BPTT:
        d->gate = STX_COMP_GATE_GRU;
        d->mogrify = 1;
        d->aux = STX_COMP_AUX_BPTT;
        d->bptt = 2;
        break;
    case ROTATE:
        d->recurrence = STX_COMP_STORE_ROTATE;
        d->recompute_layers = SIZE_MAX;
        d->attn_dropout = d->out_dropout = d->ff_dropout = d->aux_dropout = 0.1;
        break;
    case PLAIN:
        d->no_memory = 1;
        d->gate = STX_COMP_GATE_OUTPUT;
        break;
    case CUSTOM: d->custom = &custom_method; break;
    }
}

static void model_make(model *r, int which, int device, int precision, int no_graph) {
    stx_comp_desc d;
    stx_optim_desc od;
    stx_desc cd;
    memset(r, 0, sizeof *r);
    memset(&d, 0, sizeof d);
    memset(&od, 0, sizeof od);
    memset(&cd, 0, sizeof cd);
    cd.device = device;
    cd.precision = precision;
    cd.no_graph = no_graph;
    cd.seed = 5;
    cd.threads = 1;
    r->x = stx_create(&cd);
    r->B = 2;
    r->S = 8;
    r->V = 13;
    d.vocab = r->V;
    /* heads of 16 channels use the fused attention */
    d.dim = which == GRU || which == USED ? 32 : 20;
    d.layers = model_layers;
    d.heads = 2;
    d.inner = 40;
    d.segment = r->S;
    d.mem = 12;
    d.cmem = 4;
    d.ratio = 4;
    model_options(&d, which);
    r->m = stx_comp_create(r->x, &d);
    CHECK(stx_ok(r->x), "%s, device %d: %s", model_names[which], device, stx_error(r->x));
    od.kind = STX_SGD;
    od.clip = 1;
    od.momentum = 0.9;
    r->o = stx_optim_create(r->m->params, &od);
    r->s = stx_comp_state_create(r->m, r->B);
    r->in = stx_tokens_create(r->x, r->B, r->S);
    r->out = stx_tokens_create(r->x, r->B, r->S);
    stx_optim_set_lr(r->o, 0.05);
    CHECK(stx_ok(r->x), "%s, device %d: %s", model_names[which], device, stx_error(r->x));
}

static void model_free(model *r) {
    stx_comp_state_free(r->s);
    stx_destroy(r->x);
}

static int32_t *tokens_of(size_t n, size_t V, size_t salt) {
    int32_t *id = (int32_t *)malloc((n + 1) * sizeof *id);
    size_t i;
    for (i = 0; i < n; i++) id[i] = (int32_t)((i * i * 31 + i * 17 + salt * 7 + i / 3) % V);
    return id;
}

static void model_step(void *user) {
    model *r = (model *)user;
    stx_tensor *loss;
    stx_begin(r->x, STX_TRAIN);
    loss = stx_comp_loss(r->m, r->in, r->out, NULL, r->s, r->s);
    stx_metric_set(r->x, 0, loss, 1, 0);
    stx_backward(r->x, stx_comp_total(r->m, loss));
    stx_optim_step(r->o, 0.05);
}

static double model_run(model *r, int n) {
    int32_t *id = tokens_of(r->B * r->S + 1, r->V, (size_t)n + 1);
    stx_tokens_set(r->x, r->in, id);
    stx_tokens_set(r->x, r->out, id + 1);
    stx_step_run(r->x, stx_comp_key(r->m, r->in, r->out, r->s, 0), model_step, r);
    free(id);
    r->loss = stx_metric_get(r->x, 0);
    return r->loss;
}

/* Runs step n with padding vectors and with a stream that restarts occasionally. Every
   third step is shorter. */
static double model_padded(model *r, int n) {
    size_t T = n % 3 == 2 ? r->S - 3 : r->S, b, i;
    int32_t *id = tokens_of(r->B * T + 1, r->V, (size_t)n + 1),
            *pad = (int32_t *)calloc(r->B * T, sizeof *pad);
    stx_ids *p;
    stx_tensor *h, *loss;
    double v;
    if (n % 4 == 3) stx_comp_state_reset_stream(r->s, (size_t)n / 4 % r->B);
    for (b = 0; b < r->B; b++)
        for (i = 0; i < T; i++) pad[b * T + i] = n % 2 && b == 1 && (i < 3 || i == 5);
    stx_begin(r->x, STX_TRAIN);
    p = stx_tokens(r->x, pad, r->B, T);
    h = stx_comp_segment(r->m, stx_comp_embed(r->m, stx_tokens(r->x, id, r->B, T)), p, r->s, r->s);
    loss = stx_comp_nll(r->m, h, stx_tokens(r->x, id + 1, r->B, T), p);
    v = stx_item(r->x, loss);
    stx_backward(r->x, stx_comp_total(r->m, loss));
    stx_optim_step(r->o, 0.05);
    free(id);
    free(pad);
    return v;
}

/* Trains a model of each kind for a few steps on the CPU and on the GPU and compares
   the losses and, in f32, the parameters and memories. (The golden vectors cover all of
   this in f32, but nothing in bf16.) */
static void compare_models(int which, int half_, int padded) {
    const char *name = model_names[which];
    const double tol = half_ ? 3e-2 : 1e-4;
    model a, b;
    size_t i, l;
    int n;
    model_make(&a, which, STX_CPU, STX_PREC_F32, 0);
    model_make(&b, which, STX_CUDA, cuda_precision(half_), 0);
    for (n = 0; n < 7 && stx_ok(b.x); n++) {
        double la = padded ? model_padded(&a, n) : model_run(&a, n),
               lb = padded ? model_padded(&b, n) : model_run(&b, n);
        CHECK(stx_ok(a.x) && stx_ok(b.x), "%s, step %d: %s%s", name, n, stx_error(a.x),
              stx_error(b.x));
        CHECK(fabs(la - lb) <= tol * la,
              "%s, bf16 %d, padded %d, step %d: loss %.7f on the CPU, %.7f on the GPU", name, half_,
              padded, n, la, lb);
    }
    for (i = 0; i < a.m->params->count && !half_; i++) {
        const stx_tensor *t = a.m->params->tensor[i];
        double e = cuda_error(b.x, b.m->params->tensor[i]->data, t->data, t->size, 1e-3);
        CHECK(e <= 2e-4, "%s, padded %d: error %g in %s", name, padded, e, a.m->params->name[i]);
    }
    for (l = 0; l < a.m->desc.layers && stx_ok(b.x); l++) {
        cuda_check_memory(name, b.x, b.s->mem, a.s->mem, l, half_ ? 0 : 2e-4);
        cuda_check_memory(name, b.x, b.s->comp, a.s->comp, l, half_ ? 0 : 2e-4);
    }
    model_free(&a);
    model_free(&b);
}

static void test_models(void) {
    /* models that are tested in f32: bit 0 without padding, bit 1 with padding */
    static const int in_f32[MODELS] = {1, 0, 3, 0, 0, 2, 1, 2, 0};
    int which, half_, padded;
    for (half_ = 0; half_ < 2; half_++)
        for (which = 0; which < MODELS; which++)
            for (padded = 0; padded < 2; padded++) {
                int runs = half_ ? padded == which % 2 : in_f32[which] >> padded & 1;
                if (runs && (!brief || which == USED + half_)) compare_models(which, half_, padded);
            }
}

/* The results of a replayed step must be bit-identical to those of a launched step.
   Once the memory is full, all steps must be replayed, except with
   STX_COMP_STORE_ROTATE, which swaps buffers in every step. */
static void test_graph(void) {
    static const int models[] = {USED, BPTT, TIED, ROTATE};
    size_t k;
    int n;
    for (k = 0; k < COUNT(models); k++) {
        int which = models[k];
        model a, b;
        uint64_t ha = 1, hb = 1;
        long replays = cuda_replays();
        if (brief && which != USED && which != BPTT) continue;
        model_make(&a, which, STX_CUDA, STX_PREC_F32, 1);
        model_make(&b, which, STX_CUDA, STX_PREC_F32, 0);
        for (n = 0; n < 10; n++) {
            double la = model_run(&a, n), lb = model_run(&b, n);
            CHECK(la == lb, "%s, step %d: %.9g launched, %.9g replayed", model_names[which], n, la,
                  lb);
            /* An evaluation in the same arenas, so that a sanitizer detects a replay that
               uses freed memory. */
            if (n == 7 && !brief) {
                stx_begin(b.x, STX_EVAL);
                CHECK(isfinite(stx_item(b.x, stx_comp_loss(b.m, b.in, b.out, NULL, NULL, NULL))),
                      "an evaluation between replays");
            }
        }
        ha = cuda_hash_params(a.x, a.m->params, ha);
        hb = cuda_hash_params(b.x, b.m->params, hb);
        CHECK(ha == hb, "%s: replays give other parameters", model_names[which]);
        CHECK(!*stx_step_replay_status(b.x) == (which != ROTATE), "%s: the last step: \"%s\"",
              model_names[which], stx_step_replay_status(b.x));
        replays = cuda_replays() - replays;
        if (CUDA_ON_HOST)
            CHECK(replays >= (which == ROTATE ? 0 : 4), "%s: %ld replays of 10 steps",
                  model_names[which], replays);
        model_free(&a);
        model_free(&b);
    }
}

#ifdef SEQTX_CUDA_HOST
static int print_nodes; /* set by build/test_cuda_comp nodes */

/* Counts, as in test_cuda_model.c, the graph nodes of a layer with a memory, its
   compression and its auxiliary loss. */
static void test_nodes(void) {
    static const struct {
        int which;
        long nodes;
    } expected[] = {{GRU, 66}};

    size_t i;
    for (i = 0; i < COUNT(expected); i++) {
        cuda_nodes all;
        int k, n;
        memset(&all, 0, sizeof all);
        for (k = 0; k < 2; k++) {
            model r;
            model_layers = (size_t)(2 + k);
            model_make(&r, expected[i].which, STX_CUDA, STX_PREC_BF16, 0);
            for (n = 0; n < 12; n++) model_run(&r, n);
            CHECK(stx_ok(r.x) && !*stx_step_replay_status(r.x), "%s: %s%s",
                  model_names[expected[i].which], stx_error(r.x), stx_step_replay_status(r.x));
            cuda_nodes_add(&all, k);
            model_free(&r);
        }
        cuda_nodes_check(&all, model_names[expected[i].which], 2, expected[i].nodes, print_nodes);
    }
    model_layers = 2;
}
#endif

/* Returns the number of tokens to feed at position `at`. Some calls cross the end of a
   segment. One stream is reset on the way. */
static size_t fed_at(size_t at) {
    if (at == 0) return 21;
    return at < 26 ? 1 : 3;
}

static void test_generation(void) {
    int which;
    for (which = 0; which < MODELS; which++) {
        model a, b;
        stx_comp_gen *ga, *gb;
        int32_t *id;
        size_t at, n;
        if (brief && which != USED) continue;
        model_make(&a, which, STX_CPU, STX_PREC_F32, 0);
        model_make(&b, which, STX_CUDA, STX_PREC_F32, 0);
        ga = stx_comp_gen_create(a.m, 2);
        gb = stx_comp_gen_create(b.m, 2);
        id = tokens_of(2 * 40, a.V, 2);
        for (at = 0; at < 30; at += n) {
            const stx_real *la, *lb;
            n = fed_at(at);
            if (at == 23) {
                stx_comp_gen_reset_stream(ga, 1);
                stx_comp_gen_reset_stream(gb, 1);
            }
            la = stx_comp_gen_feed(ga, id, n);
            lb = stx_comp_gen_feed(gb, id, n);
            CHECK(la && lb, "%s: %s", model_names[which], stx_error(b.x));
            if (la && lb)
                CHECK(max_difference(la, lb, 2 * a.V) < 1e-4, "%s, token %zu: logits differ by %g",
                      model_names[which], at, max_difference(la, lb, 2 * a.V));
        }
        free(id);
        stx_comp_gen_free(ga);
        stx_comp_gen_free(gb);
        model_free(&a);
        model_free(&b);
    }
}

static void refused(int which, const char *expected) {
    stx_comp_groups g;
    stx_comp_gate_args a;
    stx_attention_args t;
    stx_ctx *x = cuda_ctx(STX_CUDA, STX_PREC_F32);
    stx_real *v = cuda_array(x, NULL, 64, STX_MEM_ACTIVATIONS);
    memset(&g, 0, sizeof g);
    memset(&a, 0, sizeof a);
    memset(&t, 0, sizeof t);
    g.B = 1;
    g.rows = 4;
    g.groups = 2;
    g.taps = 2;
    g.D = 4;
    a.N = 1;
    a.D = 4;
    a.x = a.y = a.dout = v;
    a.out = a.dx = a.dy = v;
    t.B = t.T = t.H = 1;
    t.S = 4;
    t.D = 4;
    t.q = t.k = v;
    t.row_max = t.inv_sum = v;
    t.span = 4;
    t.scale = 1;
    if (which == 0) stx_comp_unfold_cuda(x, v, v, &g, 0);
    if (which == 1) stx_comp_fold_cuda(x, v, v, &g);
    if (which == 2) stx_comp_pool_cuda(x, v, v, &g, 0);
    if (which == 3) stx_comp_pick_cuda(x, v, v, v, 8, &g);
    if (which == 4) {
        a.kind = STX_COMP_GATE_RESIDUAL;
        stx_comp_gate_fwd_cuda(x, &a);
    }
    if (which == 5) {
        a.kind = STX_COMP_GATE_GLU + 1;
        stx_comp_gate_bwd_cuda(x, &a);
    }
    if (which == 6) stx_comp_usage_cuda(x, v, 8, &t, 2, 3);
    if (which == 7) {
        t.not_causal = 1;
        stx_comp_usage_cuda(x, v, 8, &t, 0, 3);
    }
    if (which == 8) {
        t.span_fraction = v;
        stx_comp_usage_cuda(x, v, 8, &t, 0, 3);
    }
    CHECK(!stx_ok(x) && strstr(stx_error(x), expected), "case %d: expected an error of %s, got %s",
          which, expected, stx_error(x));
    stx_destroy(x);
}

static void test_refused(void) {
    static const char *const expected[] = {
        "stx_comp_unfold",   "stx_comp_fold",     "stx_comp_pool",  "stx_comp_pick",
        "stx_comp_gate_fwd", "stx_comp_gate_bwd", "stx_comp_usage", "stx_comp_usage",
        "stx_comp_usage"};
    stx_ctx *x = cuda_ctx(STX_CUDA, STX_PREC_F32);
    stx_comp_groups g;
    stx_comp_gate_args a;
    stx_attention_args t;
    stx_comp_error_args e;
    int i;
    memset(&g, 0, sizeof g);
    memset(&a, 0, sizeof a);
    memset(&t, 0, sizeof t);
    memset(&e, 0, sizeof e);
    e.D = 5;
    stx_comp_unfold_cuda(x, NULL, NULL, &g, 0); /* nothing to do */
    stx_comp_fold_cuda(x, NULL, NULL, &g);
    stx_comp_pool_cuda(x, NULL, NULL, &g, 1);
    stx_comp_pick_cuda(x, NULL, NULL, NULL, 0, &g);
    stx_comp_usage_cuda(x, NULL, 0, &t, 0, 0);
    stx_comp_error_bwd_cuda(x, &e);
    stx_comp_gate_fwd_cuda(x, &a);
    stx_comp_gate_bwd_cuda(x, &a);
    CHECK(stx_ok(x), "empty: %s", stx_error(x));
    stx_destroy(x);
    for (i = 0; i < (int)COUNT(expected); i++) refused(i, expected[i]);
}

int main(int argc, char **argv) {
    const char *part = argc > 1 ? argv[1] : "";
    brief = !strcmp(part, "short");
    if (brief) part = "";
    cx = cuda_ctx(STX_CPU, STX_PREC_F32);
    for (half = 0; half < 2; half++) {
        gx = cuda_ctx(STX_CUDA, cuda_precision(half));
        CHECK(stx_ok(gx), "%s", stx_error(gx));
        for (off = 0; off < 2 && stx_ok(gx); off++) {
            if (PART("groups")) {
                test_groups();
                test_pool_nan();
            }
            if (PART("pick")) test_pick();
            if (PART("usage")) test_usage();
            if (PART("error")) test_errors();
            if (PART("gates")) {
                test_gates();
                test_gate_biases();
            }
        }
        stx_destroy(gx);
        for (off = 0; off < 2 && PART("bits"); off++) cuda_orders("kernels", bits, NULL);
        off = 0;
    }
    half = 0;
    if (PART("models")) test_models();
    if (PART("graph")) test_graph();
#ifdef SEQTX_CUDA_HOST
    print_nodes = !strcmp(part, "nodes");
    if (PART("nodes")) test_nodes();
#endif
    if (PART("generation")) test_generation();
    if (PART("refused")) test_refused();
    stx_destroy(cx);
    return cuda_test_end();
}
