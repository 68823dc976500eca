/* test_cuda_sru.c - the recurrence's CUDA twins against its plain definition
   (stx_sru_fwd_plain, stx_sru_bwd_plain), and the CPU's twins against the same: every
   option, in f32 and bf16, at odd sizes, from misaligned starts, with guard numbers
   around every array, in any order of threads. ReZero and dropout over time. "short"
   leaves the large cases out. */
#include "../seqtx_sru.h"
#include "kernels.h"
#include "cuda_arr.h"

static int brief; /* sanitizers are slow */

typedef struct shape {
    size_t B, T, H, D, k;
    /* pad: 1 some, 2 all; dxr: 2 adds; c0: 2 an activation */
    int tanh, xr, v, V, c0, m, pad, dh, dlast, dxr, dv, dc0;
    int odd; /* u is stored otherwise than the rest */
} shape;

enum { U, XR, V_, C0, M, DH, DLAST, BIAS, VP, H_, LAST, C, DU, DV_, DXR, DVP, DBIAS, DC0, ARRAYS };

typedef struct recurrence {
    shape s;
    arr a[ARRAYS];
    int32_t *pad, *dpad;
    void *work;
    stx_sru_args on; /* the GPU's arguments */
} recurrence;

/* Arguments for one side: the numbers of arrays by `at` */
static stx_real *of_cpu(const recurrence *t, int i) {
    return t->a[i].c;
}

static stx_real *of_gpu(const recurrence *t, int i) {
    return t->a[i].d;
}

static stx_sru_args args_of(const recurrence *t, stx_real *(*at)(const recurrence *, int)) {
    const shape *s = &t->s;
    stx_sru_args a;
    memset(&a, 0, sizeof a);
    a.B = s->B;
    a.T = s->T;
    a.H = s->H;
    a.D = s->D;
    a.k = s->k;
    a.tanh = s->tanh;
    a.alpha = 1.7f;
    a.u = at(t, U);
    a.xr = s->xr && s->k == 3 ? at(t, XR) : NULL;
    a.v = s->v ? at(t, VP) : NULL;
    a.bias = at(t, BIAS);
    a.V = s->V ? at(t, V_) : NULL;
    a.c0 = s->c0 ? at(t, C0) : NULL;
    a.m = s->m ? at(t, M) : NULL;
    a.h = at(t, H_);
    a.last = at(t, LAST);
    a.c = at(t, C);
    a.dh = s->dh ? at(t, DH) : NULL;
    a.dlast = s->dlast ? at(t, DLAST) : NULL;
    a.du = at(t, DU);
    a.dV = s->V ? at(t, DV_) : NULL;
    a.dxr = s->dxr ? at(t, DXR) : NULL;
    a.add_xr = s->dxr == 2;
    a.dv = s->dv ? at(t, DVP) : NULL;
    a.dbias = at(t, DBIAS);
    a.dc0 = s->dc0 ? at(t, DC0) : NULL;
    return a;
}

static void recurrence_make(recurrence *t, const shape *given) {
    shape *s = &t->s;
    size_t O, N, tiles, i, j;
    memset(t, 0, sizeof *t);
    *s = *given;
    if (s->k == 4) s->xr = 0;
    if (!s->xr) s->dxr = 0;
    O = s->D * s->H;
    N = s->B * s->T;
    tiles = (s->T + STX_SRU_TILE - 1) / STX_SRU_TILE;
    t->a[U] = arr_of(N * s->k * O, 2, 0, s->odd ? B_ : N_);
    t->a[XR] = arr_of(N * O, 1, 0, N_);
    t->a[V_] = arr_of(N * 2 * O, 0.5, 0, N_);
    t->a[C0] = arr_of(s->B * O, 1, 0, s->c0 == 2 ? N_ : B_);
    t->a[M] = arr_of(s->B * O, 2, 1, B_);
    t->a[DH] = arr_of(N * O, 1, 0, N_);
    t->a[DLAST] = arr_of(s->B * O, 1, 0, B_);
    t->a[BIAS] = arr_of(2 * O, 1, 0, P_);
    t->a[VP] = arr_of(2 * O, 1.2, 0, P_);
    t->a[H_] = arr_of(N * O, 1, 0, N_);
    t->a[LAST] = arr_of(s->B * O, 1, 0, B_);
    t->a[C] = arr_of(s->B * tiles * O, 1, 0, B_);
    t->a[DU] = arr_of(N * s->k * O, 1, 0, N_);
    t->a[DV_] = arr_of(N * 2 * O, 1, 0, N_);
    t->a[DXR] = arr_of(N * O, 1, 0, N_);
    t->a[DVP] = arr_of(2 * O, 1, 0, B_);
    t->a[DBIAS] = arr_of(2 * O, 1, 0, B_);
    t->a[DC0] = arr_of(s->B * O, 1, 0, s->c0 == 2 ? N_ : B_);
    /* forget gates near 1: what a tile begins with is felt at its end */
    if (s->T > STX_SRU_TILE && (s->T + s->H + s->B) % 2) {
        for (j = 0; j < O; j++) t->a[BIAS].c[j] += 3;
        stx_cuda_upload_activations(gx, t->a[BIAS].d, t->a[BIAS].c, t->a[BIAS].n);
    }
    t->pad = (int32_t *)calloc(N + 1, sizeof *t->pad);
    for (i = 0; i < N && s->pad; i++) {
        t->pad[i] = s->pad == 2 || test_rand() > 0.5 || i % s->T >= 40;
        if (!t->pad[i]) continue;
        for (j = 0; j < O; j++) { /* nothing there may be used */
            t->a[U].c[i * s->k * O + j] = t->a[U].c[(i * s->k + s->k - 1) * O + j] =
                t->a[XR].c[i * O + j] = t->a[V_].c[i * 2 * O + j] = t->a[DH].c[i * O + j] = NAN;
        }
    }
    if (s->pad)
        for (i = 0; i <= DH; i++)
            if (i == U || i == XR || i == V_ || i == DH)
                stx_cuda_upload_activations(gx, t->a[i].d, t->a[i].c, t->a[i].n);
    t->dpad = (int32_t *)cuda_bytes(gx, t->pad, N * sizeof *t->pad);
    t->on = args_of(t, of_gpu);
    t->on.pad = s->pad ? t->dpad : NULL;
    t->work = stx_cuda_alloc(gx, stx_sru_work_cuda(gx, &t->on, 1) + 1, STX_MEM_BYTES);
}

static void recurrence_free(recurrence *t) {
    int i;
    for (i = 0; i < ARRAYS; i++) arr_free(t->a + i);
    free(t->pad);
    stx_cuda_free(gx, t->dpad);
    stx_cuda_free(gx, t->work);
}

static void on_gpu(recurrence *t) {
    t->on.work = NULL;
    stx_sru_fwd_cuda(gx, &t->on);
    t->on.work = t->work;
    stx_sru_bwd_cuda(gx, &t->on);
}

/* Both twins against the definition. Errors of a float grow by up to |J| a step, see J
   in seqtx_sru.h; and c cancels in no sum. */
static void compare(const shape *s) {
    static const char *const part[ARRAYS] = {"u",     "xr",   "V",   "c0", "m",     "dh",
                                             "dlast", "bias", "v",   "h",  "last",  "c",
                                             "du",    "dV",   "dxr", "dv", "dbias", "dc0"};
    recurrence t;
    stx_sru_args cpu;
    float *was[ARRAYS];
    char name[160];
    double *state;
    int i;
    recurrence_make(&t, s);
    s = &t.s;
    cpu = args_of(&t, of_cpu);
    cpu.pad = s->pad ? t.pad : NULL;
    /* the CPU's results, then what was there before for the definition */
    for (i = H_; i < ARRAYS; i++) {
        was[i] = (float *)malloc((t.a[i].n + 1) * sizeof(float));
        memcpy(was[i], t.a[i].c, t.a[i].n * sizeof(float));
    }
    cpu.work = malloc(stx_sru_work(cx, &cpu, 0) + 1);
    stx_sru_fwd(cx, &cpu);
    free(cpu.work);
    cpu.work = malloc(stx_sru_work(cx, &cpu, 1) + 1);
    stx_sru_bwd(cx, &cpu);
    free(cpu.work);
    for (i = H_; i < ARRAYS; i++) {
        size_t j;
        for (j = 0; j < t.a[i].n; j++) {
            float v = was[i][j];
            was[i][j] = t.a[i].c[j];
            t.a[i].c[j] = v;
        }
    }
    state = (double *)malloc((s->T + 1) * sizeof *state);
    stx_sru_fwd_plain(&cpu, state);
    stx_sru_bwd_plain(&cpu, state);
    free(state);
    on_gpu(&t);
    for (i = 0; i < ARRAYS; i++) {
        snprintf(
            name, sizeof name,
            "%s of B %zu T %zu H %zu D %zu k %zu tanh %d xr %d v %d V %d c0 %d m %d pad %d dh %d "
            "dlast %d dxr %d "
            "odd %d",
            part[i], s->B, s->T, s->H, s->D, s->k, s->tanh, s->xr, s->v, s->V, s->c0, s->m, s->pad,
            s->dh, s->dlast, s->dxr, s->odd);
        least = i >= DVP && i <= DBIAS ? 1 : 1e-3; /* sums of both signs */
        if (i >= H_) {
            size_t j, bad = 0;
            double top = least;
            for (j = 0; j < t.a[i].n; j++)
                if (fabs((double)t.a[i].c[j]) > top) top = fabs((double)t.a[i].c[j]);
            for (j = 0; j < t.a[i].n; j++)
                bad += !(fabs((double)was[i][j] - (double)t.a[i].c[j]) <= 5e-6 * top);
            CHECK(!bad, "the CPU's %s: %zu differ", name, bad);
            free(was[i]);
        }
        if (i < H_ && s->pad) continue; /* NaN there */
        arr_check(name, t.a + i, i < H_ ? 0 : 5e-6);
    }
    least = 0;
    recurrence_free(&t);
}

static void test_options(void) {
    static const size_t wide[] = {1, 3, 31, 32, 33, 64, 70, 130},
                        lengths[] = {1, 31, 32, 33, 65, 200};
    static const shape base = {1, 1, 1, 1, 3, 0, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1, 0};
    size_t h, l, n = 0;
    /* all sizes; options alternating */
    for (h = 0; h < COUNT(wide); h++)
        for (l = 0; l < COUNT(lengths); l++, n++) {
            shape s = base;
            if (brief && n % 5) continue;
            s.B = 1 + n % 3;
            s.T = lengths[l];
            s.H = wide[h];
            s.D = 1 + n / 2 % 2;
            s.k = 3 + n / 3 % 2;
            s.tanh = (int)(n / 4 % 2);
            s.V = (int)(n / 5 % 2);
            s.v = n % 7 != 0;
            s.m = (int)(n % 2);
            s.c0 = (int)(n % 3);
            s.pad = n % 11 == 5 ? 2 : n % 4 == 1;
            s.dlast = n % 5 != 2;
            s.dh = n % 9 != 4;
            s.dxr = (int)(n % 3);
            s.xr = n % 8 != 6;
            s.dv = s.v && n % 10 != 3;
            s.dc0 = s.c0 != 0;
            compare(&s);
        }
    for (
        n = 0; n < 384;
        n++) { /* all options at sizes that go in pieces of 16 bytes, and at one that does not: any but one
                                               of the seven options together in each
                                               precision, all seven in one of the two */
        shape s = base;
        size_t options = n / 2 % 2 + n / 4 % 2 + n / 8 % 2 + n / 16 % 2 + n / 32 % 2 + n / 64 % 3
                         + n / 192;
        if ((options + off + (size_t)half) % 2 || (brief && n % 13) || (off && n % 3 != 1))
            continue;
        s.B = 2;
        s.T = (n % 13 < 4 ? 65 : 33) + n % 7;
        s.H = n % 12 == 5 ? 37 : n % 2 ? 40 : 72;
        s.D = 1 + n / 2 % 2;
        s.k = 3 + n / 4 % 2;
        s.tanh = (int)(n / 8 % 2);
        s.V = (int)(n / 16 % 2);
        s.v = (int)(n / 32 % 2);
        s.pad = (int)(n / 64 % 3);
        s.xr = n / 192 % 2 == 0;
        s.dxr = (int)(n % 3);
        s.m = n % 5 != 0;
        s.c0 = (int)(n % 3);
        s.dh = n % 17 != 3;
        s.dlast = n % 7 != 3;
        s.dv = s.v;
        s.dc0 = s.c0 != 0;
        s.odd = half && n % 16 == 9;
        compare(&s);
    }
    for (n = 0; n < 4 && !brief && !off; n++) { /* so many columns that time is not cut */
        shape s = base;
        s.B = 3;
        s.T = 33;
        s.H = 10008 + n / 2;
        s.k = 3 + n % 2;
        s.v = n != 2;
        s.dv = s.v;
        s.V = n == 3;
        s.pad = n == 1;
        compare(&s);
    }
}

/* The same columns alone and among so many others that time is not cut: equal but for
   rounding. A NaN stays in its column, and where time goes from it. */
static void test_columns(void) {
    enum { T = 100, SHORT = 40, FEW = 64, WIDE = 30048 };

    shape s = {1, T, WIDE, 1, 3, 0, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1, 0}, few = s;
    recurrence w, t;
    static const int plane[] = {U, XR, DH, H_, DU, DXR};
    size_t i, j, n, at;
    int v;
    few.H = FEW;
    s.T = few.T = SHORT;
    /* without v, which float has, forward is a scan of few columns */
    for (v = half; v <= half && !brief && !off; v++) {
        s.v = few.v = s.dv = few.dv = v;
        recurrence_make(&w, &s);
        recurrence_make(&t, &few);
        for (at = 0; at < 3; at++) {
            const arr *from = w.a + plane[at];
            arr *to = t.a + plane[at];
            for (n = 0; n < to->n / FEW; n++)
                memcpy(to->c + n * FEW, from->c + n * WIDE, FEW * sizeof(float));
        }
        for (j = C0; j <= VP; j++)
            for (n = 0; j != DH && n < t.a[j].n / FEW; n++)
                memcpy(t.a[j].c + n * FEW, w.a[j].c + n * WIDE, FEW * sizeof(float));
        for (j = 0; j <= VP; j++) stx_cuda_upload_activations(gx, t.a[j].d, t.a[j].c, t.a[j].n);
        on_gpu(&w);
        on_gpu(&t);
        for (at = 3; at < 6; at++) {
            float *a = arr_get(w.a + plane[at]);
            for (n = 0; n < t.a[plane[at]].n / FEW; n++)
                memcpy(t.a[plane[at]].c + n * FEW, a + n * WIDE, FEW * sizeof(float));
            free(a);
            arr_check("the same columns, few and many", t.a + plane[at], 5e-6);
        }
        recurrence_free(&w);
        recurrence_free(&t);
    }
    /* NaN in u0 at time 40 of column 5; v & 2: no v, so that forward is a scan */
    for (v = 0; v < 4; v++) {
        float *before[ARRAYS], *after;
        few.B = 2;
        few.D = 2;
        few.T = T;
        few.v = few.dv = !(v & 2);
        few.k = 3;
        recurrence_make(&t, &few);
        on_gpu(&t);
        for (i = H_; i < ARRAYS; i++) before[i] = arr_get(t.a + i);
        for (i = DVP; i < ARRAYS; i++)
            stx_cuda_upload_activations(gx, t.a[i].d, t.a[i].c, t.a[i].n);
        at = ((v & 1 ? T : 0) + 40) * 3 * 2 * FEW + (v & 1 ? FEW : 0) + 5;
        t.a[U].c[at] = NAN;
        stx_cuda_upload_activations(gx, t.a[U].d, t.a[U].c, t.a[U].n);
        on_gpu(&t);
        for (i = H_; i < ARRAYS; i++) {
            size_t bad = 0, nans = 0, O = 2 * FEW, col = (v & 1 ? FEW : 0) + 5;
            after = arr_get(t.a + i);
            for (n = 0; n < t.a[i].n; n++) {
                if (n % O == col)
                    nans += after[n] != after[n];
                else
                    bad += memcmp(after + n, before[i] + n, 4) != 0;
            }
            CHECK(!bad, "NaN in one column, array %zu: %zu numbers of others are different", i,
                  bad);
            if (i == H_)
                CHECK(nans == (v & 1 ? 41 : T - 40), "NaN in one column: %zu outputs are NaN",
                      nans);
            if (i == LAST) CHECK(nans == 1, "NaN in one column: %zu states are", nans);
            free(before[i]);
            free(after);
        }
        recurrence_free(&t);
    }
}

/* The same bits each time */
static void bits(void *user, uint64_t *h) {
    const shape *s = (const shape *)user;
    recurrence t;
    int i;
    test_state = 88172645463325252u;
    gx = cuda_ctx(STX_CUDA, half ? STX_PREC_BF16 : STX_PREC_F32);
    recurrence_make(&t, s);
    on_gpu(&t);
    CHECK(stx_ok(gx), "bits: %s", stx_error(gx));
    for (i = H_; i < ARRAYS; i++)
        if ((i != DV_ || s->V) && (i != DXR || t.s.dxr)) *h = cuda_hash(gx, t.a[i].d, t.a[i].n, *h);
    recurrence_free(&t);
    stx_destroy(gx);
}

static void test_bits(void) {
    static const shape s[] = {{2, 200, 72, 2, 3, 0, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1, 0},
                              {1, 300, 40, 1, 4, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 0},
                              {3, 290, 33, 1, 3, 0, 1, 0, 0, 1, 1, 1, 1, 1, 2, 0, 1, 0},
                              {3, 33, 10008, 1, 3, 0, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1, 0}};
    size_t i;
    for (i = 0; i < COUNT(s) - (brief || off ? 1 : 0); i++)
        cuda_orders("recurrence", bits, (void *)(uintptr_t)(s + i));
}

/* As an op, in a graph with a mask drawn once for all times: forward and backward on
   both devices */
static void test_ops(void) {
    enum { B = 2, T = 37, O = 24 };

    float *u = cuda_random(B * T * 3 * O, 2, 0), *xr = cuda_random(B * T * O, 1, 0),
          *c0 = cuda_random(B * O, 1, 0), *w = cuda_random(B * T * O, 1, 0), *out[2][7];
    size_t size[7] = {B * T * O, B * O, B * T * 3 * O, B * T * O, B * O, 2 * O, 1};
    int32_t pad[B * T] = {0};
    int d, i;
    if (half) {
        cuda_round(u, B * T * 3 * O);
        cuda_round(xr, B * T * O);
        cuda_round(c0, B * O);
        cuda_round(w, B * T * O);
    }
    for (i = 30; i < T; i++) pad[T + i] = 1;
    for (d = 0; d < 2; d++) {
        stx_ctx *x = cuda_ctx(d ? STX_CUDA : STX_CPU, d && half ? STX_PREC_BF16 : STX_PREC_F32);
        stx_params *p = stx_params_create(x);
        stx_tensor *bias = stx_param(p, STX_NORMAL, 0.3, "bias", 2, O, 0, 0),
                   *v = stx_param(p, STX_NORMAL, 0.5, "v", 2, O, 0, 0),
                   *alpha = stx_param(p, STX_CONSTANT, 0.4, "alpha", 1, 0, 0, 0), *last, *y, *z,
                   *loss;
        stx_tensor *U1, *X1, *C1, *W1;
        stx_sru_recurrence_in cell;
        stx_real *block = stx_block_f32(x, 5);
        for (i = 0; i < 7; i++) out[d][i] = (float *)calloc(size[i], sizeof(float));
        CHECK(block && (!d || !stx_cuda_is_bf16(x, block)), "block_full is not of floats");
        stx_download(x, out[d][0], block, 5);
        for (i = 0; i < 5; i++) CHECK(out[d][0][i] == 0, "block_full is not zero");
        stx_block_activations_free(x, block);
        stx_begin(x, STX_TRAIN);
        U1 = stx_variable(x, u, B, T, 3, O);
        X1 = stx_variable(x, xr, B, T, O, 0);
        C1 = stx_variable(x, c0, B, O, 0, 0);
        W1 = stx_input(x, w, B, T, O, 0);
        memset(&cell, 0, sizeof cell);
        cell.u = U1;
        cell.xr = stx_dropout_variational(x, X1, 0.3);
        cell.v = v;
        cell.bias = bias;
        cell.c0 = C1;
        cell.pad = stx_tokens(x, pad, B, T);
        cell.alpha = 1.3;
        cell.directions = 2;
        cell.mask = stx_new_f32(x, B, O, 0, 0);
        if (cell.mask) {
            STX_RUN(x, stx_fill, (x, cell.mask->data, B * O, 1));
            cell.mask = stx_dropout(x, cell.mask, 0.25);
        }
        y = stx_sru_recurrence(x, &cell, &last);
        z = stx_rezero(x, X1, y, alpha);
        loss = stx_add(x, stx_scale(x, stx_mean(x, stx_mul(x, z, W1)), 100), stx_mean(x, last));
        stx_backward(x, loss);
        CHECK(stx_ok(x), "op: %s", stx_error(x));
        if (stx_ok(x)) {
            stx_get(x, z, out[d][0]);
            stx_get(x, last, out[d][1]);
            stx_download(x, out[d][2], U1->grad, size[2]);
            stx_download(x, out[d][3], X1->grad, size[3]);
            stx_download(x, out[d][4], C1->grad, size[4]);
            stx_download(x, out[d][5], v->grad, size[5]);
            stx_download(x, out[d][6], alpha->grad, 1);
        }
        stx_destroy(x);
    }
    for (i = 0; i < 7; i++) {
        double top = 1e-3, worst = 0;
        size_t n;
        for (n = 0; n < size[i]; n++) {
            double e = fabs((double)out[1][i][n] - (double)out[0][i][n]);
            if (fabs((double)out[0][i][n]) > top) top = fabs((double)out[0][i][n]);
            if (!(e <= worst)) worst = e;
        }
        CHECK(worst <= (half ? 2e-2 : 1e-5) * top && top > 1e-3, "op, result %d: %g of %g", i,
              worst, top);
        free(out[0][i]);
        free(out[1][i]);
    }
    free(u);
    free(xr);
    free(c0);
    free(w);
}

static void test_rezero(void) {
    static const size_t sizes[] = {1, 3, 4, 33, 1000, 4099, 70001};
    size_t k;
    int add;
    /* the same numbers, whatever came before: large sums cancel by chance */
    test_state = 88172645463325252u;
    for (k = 0; k < COUNT(sizes); k++) {
        size_t n = sizes[k];
        arr y = arr_of(n, 1, 0, N_), h = arr_of(n, 1, 0, N_), f = arr_of(n, 1, 0, N_),
            alpha = arr_of(1, 1, 0, P_), df = arr_of(n, 1, 0, N_), da = arr_of(1, 1, 0, B_),
            dy = arr_of(n, 1, 0, N_);
        BOTH(stx_rezero_fwd, (cx, y.c, h.c, f.c, alpha.c, n), (gx, y.d, h.d, f.d, alpha.d, n));
        arr_check("rezero", &y, 1e-6);
        least = 1;
        for (add = 0; add < 2; add++) {
            BOTH(k_rezero_bwd, (cx, df.c, da.c, dy.c, f.c, alpha.c, n, add),
                 (gx, df.d, da.d, dy.d, f.d, alpha.d, n, add));
            arr_check("rezero df", &df, 1e-6);
            arr_check("rezero dalpha", &da, n > 10000 ? 2e-6 : 1e-6);
        }
        BOTH(k_rezero_bwd, (cx, df.c, NULL, dy.c, f.c, alpha.c, n, 0),
             (gx, df.d, NULL, dy.d, f.d, alpha.d, n, 0));
        arr_check("rezero df alone", &df, 1e-6);
        BOTH(k_rezero_bwd, (cx, NULL, da.c, dy.c, f.c, alpha.c, n, 0),
             (gx, NULL, da.d, dy.d, f.d, alpha.d, n, 0));
        arr_check("rezero dalpha alone", &da, 2e-6);
        arr_check("rezero f", &f, 0);
        arr_check("rezero dy", &dy, 0);
        least = 0;
        arr_free(&y);
        arr_free(&h);
        arr_free(&f);
        arr_free(&alpha);
        arr_free(&df);
        arr_free(&da);
        arr_free(&dy);
    }
}

static void test_refused(void) {
    stx_ctx *x = cuda_ctx(STX_CUDA, STX_PREC_F32);
    stx_sru_args a;
    memset(&a, 0, sizeof a);
    a.k = 3;
    a.D = 1;
    a.T = 5;
    a.H = 4;
    stx_sru_fwd_cuda(x, &a); /* no batch rows: nothing to do */
    stx_sru_bwd_cuda(x, &a);
    CHECK(stx_ok(x), "no rows: %s", stx_error(x));
    a.B = 1;
    a.k = 5;
    stx_sru_fwd_cuda(x, &a);
    CHECK(!stx_ok(x) && strstr(stx_error(x), "stx_sru_fwd"), "five planes are no error");
    stx_destroy(x);
}

int main(int argc, char **argv) {
    brief = argc > 1 && !strcmp(argv[1], "short");
    cx = cuda_ctx(STX_CPU, STX_PREC_F32);
    for (half = 0; half < 2; half++) {
        gx = cuda_ctx(STX_CUDA, half ? STX_PREC_BF16 : STX_PREC_F32);
        CHECK(stx_ok(gx), "%s", stx_error(gx));
        for (off = 0; off < 2 && stx_ok(gx); off++) {
            test_options();
            test_columns();
            test_rezero();
        }
        stx_destroy(gx);
        for (off = 0; off < 2; off++) test_bits();
        test_ops();
    }
    test_refused();
    stx_destroy(cx);
    return cuda_test_end();
}
