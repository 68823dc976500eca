/* test_cuda_sru.c - the recurrence: its CUDA and CPU kernels compared with the plain
   definition (stx_sru_fwd_plain, stx_sru_bwd_plain), with every option, in f32 and
   bf16, with odd sizes, misaligned arrays, guard elements around them, and several
   thread orders. Also ReZero and variational dropout. "short" omits the large cases;
   another argument before it selects one part. */
#include "../../seqtx_sru.h"
#include "../ops/kernels.h"
#include "cuda_arr.h"

static int brief; /* whether "short" was given, as with sanitizers, which are slow */

typedef struct shape {
    size_t B, T, H, D, k;
    /* pad: 1 if some tokens are padded, 2 if all are; dxr: 2 if the kernel adds to the
       gradient; c0: 2 if c0 is an activation */
    int tanh, xr, v, V, c0, m, pad, dh, dlast, dxr, dv, dc0;
    int odd; /* the memory kind of u differs from that of the other inputs */
} shape;

enum { U, XR, V_, C0, M, DH, DLAST, BIAS, VP, H_, LAST, C, DU, DV_, DXR, DVP, DBIAS, DC0, ARRAYS };

typedef struct recurrence {
    shape s;
    arr a[ARRAYS];
    int32_t *pad, *dpad;
    void *work;
    stx_sru_args on; /* the GPU's arguments */
} recurrence;

/* Returns array i on the CPU. args_of calls this function or of_gpu. */
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
    /* forget gates near 1, so that the start of a tile affects its end */
    if (s->T > STX_SRU_TILE && (s->T + s->H + s->B) % 2) {
        for (j = 0; j < O; j++) t->a[BIAS].c[j] += 3;
        arr_upload(&t->a[BIAS]);
    }
    t->pad = (int32_t *)calloc(N + 1, sizeof *t->pad);
    for (i = 0; i < N && s->pad; i++) {
        t->pad[i] = s->pad == 2 || test_rand() > 0.5 || i % s->T >= 40;
        if (!t->pad[i]) continue;
        for (j = 0; j < O; j++) { /* must not be used */
            t->a[U].c[i * s->k * O + j] = t->a[U].c[(i * s->k + s->k - 1) * O + j] =
                t->a[XR].c[i * O + j] = t->a[V_].c[i * 2 * O + j] = t->a[DH].c[i * O + j] = NAN;
        }
    }
    if (s->pad)
        for (i = 0; i <= DH; i++)
            if (i == U || i == XR || i == V_ || i == DH)
                arr_upload(&t->a[i]);
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

/* Runs the CPU's forward and backward kernels and copies their results to `was`. Then
   restores the arrays for the plain definition. */
static void on_cpu(recurrence *t, stx_sru_args *cpu, float **was) {
    int i;
    size_t j;
    for (i = H_; i < ARRAYS; i++) {
        was[i] = (float *)malloc((t->a[i].n + 1) * sizeof(float));
        memcpy(was[i], t->a[i].c, t->a[i].n * sizeof(float));
    }
    cpu->work = malloc(stx_sru_work(cx, cpu, 0) + 1);
    stx_sru_fwd(cx, cpu);
    free(cpu->work);
    cpu->work = malloc(stx_sru_work(cx, cpu, 1) + 1);
    stx_sru_bwd(cx, cpu);
    free(cpu->work);
    for (i = H_; i < ARRAYS; i++)
        for (j = 0; j < t->a[i].n; j++) {
            float v = was[i][j];
            was[i][j] = t->a[i].c[j];
            t->a[i].c[j] = v;
        }
}

/* Compares both devices' kernels with the definition. Rounding errors grow by a factor
   of up to |J| per step (see J in seqtx_sru.h). There is no cancellation in the sums
   for c. */
static void compare(const shape *s) {
    static const char *const part[ARRAYS] = {"u",     "xr",   "V",   "c0", "m",     "dh",
                                             "dlast", "bias", "v",   "h",  "last",  "c",
                                             "du",    "dV",   "dxr", "dv", "dbias", "dc0"};
    recurrence t;
    stx_sru_args cpu;
    float *was[ARRAYS];
    char options[128], name[160];
    double *state;
    int i;
    recurrence_make(&t, s);
    s = &t.s;
    snprintf(options, sizeof options,
             "k %zu tanh %d xr %d v %d V %d c0 %d m %d pad %d dh %d dlast %d dxr %d odd %d", s->k,
             s->tanh, s->xr, s->v, s->V, s->c0, s->m, s->pad, s->dh, s->dlast, s->dxr, s->odd);
    cpu = args_of(&t, of_cpu);
    cpu.pad = s->pad ? t.pad : NULL;
    on_cpu(&t, &cpu, was);
    state = (double *)malloc((s->T + 1) * sizeof *state);
    stx_sru_fwd_plain(&cpu, state);
    stx_sru_bwd_plain(&cpu, state);
    free(state);
    on_gpu(&t);
    for (i = 0; i < ARRAYS; i++) {
        snprintf(name, sizeof name, "%s of B %zu T %zu H %zu D %zu %.100s", part[i], s->B, s->T,
                 s->H, s->D, options);
        least = i >= DVP && i <= DBIAS ? 1 : 1e-3; /* sums of terms of both signs */
        if (i >= H_) {
            size_t j, bad = 0;
            double top = cuda_largest(t.a[i].c, t.a[i].n, least);
            for (j = 0; j < t.a[i].n; j++)
                bad += !(fabs((double)was[i][j] - (double)t.a[i].c[j]) <= 5e-6 * top);
            CHECK(!bad, "the CPU's %s: %zu elements differ", name, bad);
            free(was[i]);
        }
        if (i < H_ && s->pad) continue; /* contains NaN */
        arr_check(name, t.a + i, i < H_ ? 0 : 5e-6);
    }
    least = 0;
    recurrence_free(&t);
}

static const shape base = {1, 1, 1, 1, 3, 0, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1, 0};

/* Tests all sizes, with alternating options. */
static void test_sizes(void) {
    static const size_t wide[] = {1, 3, 31, 32, 33, 64, 70, 130},
                        lengths[] = {1, 31, 32, 33, 65, 200};
    size_t h, l, n = 0;

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
}

/* Returns the width of case n. A row of 37 elements is not a multiple of 16 bytes; a row
   of 36 elements is one in f32, but not in bf16. */
static size_t option_width(size_t n) {
    if (n % 12 == 5) return 37;
    if (n % 12 == 8) return 36;
    return n % 2 ? 40 : 72;
}

/* Tests each combination of seven options in one of the two precisions. Together, these
   cases test all combinations of any six options in both precisions. */
static void test_options(void) {
    size_t n;
    for (n = 0; n < 384; n++) {
        shape s = base;
        size_t options = n / 2 % 2 + n / 4 % 2 + n / 8 % 2 + n / 16 % 2 + n / 32 % 2 + n / 64 % 3
                         + n / 192;
        if ((options + off + (size_t)half) % 2 || (brief && n % 13) || (off && n % 3 != 1))
            continue;
        s.B = 2;
        s.T = (n % 13 < 4 ? 65 : 33) + n % 7;
        s.H = option_width(n);
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
}

/* Tests a number of columns that is so large that time is not divided among threads. A
   warp then loads the next tile while it processes one, in slots that alternate from the
   third tile on. */
static void test_wide(void) {
    size_t n;
    for (n = 0; n < 5 && !off; n++) {
        shape s = base;
        if (brief && (n || !half)) continue;
        s.B = 3;
        s.T = n < 2 ? 70 : 33;
        s.H = 10008 + n / 2 % 2;
        s.k = 3 + n % 2;
        s.v = n != 2;
        s.dv = s.v;
        s.V = n >= 3;
        s.tanh = n == 4;
        s.pad = n == 1;
        compare(&s);
    }
}

enum { NAN_T = 100, SHORT = 40, FEW = 64, WIDE = 30048 };

static const shape columns = {1, NAN_T, WIDE, 1, 3, 0, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1, 0};

/* Computes columns alone, and then among so many others that time is not divided among
   threads. The results must be equal up to rounding. In f32 there is no v, so the
   forward pass is a scan if there are few columns. */
static void test_columns(void) {
    static const int in[] = {U, XR, DH}, out[] = {H_, DU, DXR};
    shape s = columns, few = columns;
    recurrence w, t;
    size_t n, i;
    int j;
    if (brief || off) return;
    few.H = FEW;
    s.T = few.T = SHORT;
    s.v = few.v = s.dv = few.dv = half;
    recurrence_make(&w, &s);
    recurrence_make(&t, &few);
    for (i = 0; i < COUNT(in); i++)
        for (n = 0; n < t.a[in[i]].n / FEW; n++)
            memcpy(t.a[in[i]].c + n * FEW, w.a[in[i]].c + n * WIDE, FEW * sizeof(float));
    for (j = C0; j <= VP; j++)
        for (n = 0; j != DH && n < t.a[j].n / FEW; n++)
            memcpy(t.a[j].c + n * FEW, w.a[j].c + n * WIDE, FEW * sizeof(float));
    for (j = 0; j <= VP; j++) arr_upload(&t.a[j]);
    on_gpu(&w);
    on_gpu(&t);
    for (i = 0; i < COUNT(out); i++) {
        float *a = arr_get(w.a + out[i]);
        for (n = 0; n < t.a[out[i]].n / FEW; n++)
            memcpy(t.a[out[i]].c + n * FEW, a + n * WIDE, FEW * sizeof(float));
        free(a);
        arr_check("the same columns, few and many", t.a + out[i], 5e-6);
    }
    recurrence_free(&w);
    recurrence_free(&t);
}

/* A NaN in u0 at time 40 of column 5 of one direction must stay in that column and
   spread only to later times. scan: whether v is absent, so that the forward pass is a
   scan. */
static void nan_case(int backward, int scan) {
    const size_t column = (backward ? FEW : 0) + 5, O = 2 * FEW;
    shape few = columns;
    recurrence t;
    float *before[ARRAYS];
    size_t i, n;
    few.B = few.D = 2;
    few.H = FEW;
    few.v = few.dv = !scan;
    recurrence_make(&t, &few);
    on_gpu(&t);
    for (i = H_; i < ARRAYS; i++) before[i] = arr_get(t.a + i);
    for (i = DVP; i < ARRAYS; i++) arr_upload(&t.a[i]);
    t.a[U].c[((backward ? NAN_T : 0) + 40) * 3 * O + column] = NAN;
    arr_upload(&t.a[U]);
    on_gpu(&t);
    for (i = H_; i < ARRAYS; i++) {
        float *after = arr_get(t.a + i);
        size_t bad = 0, nans = 0;
        for (n = 0; n < t.a[i].n; n++) {
            if (n % O == column)
                nans += after[n] != after[n];
            else
                bad += memcmp(after + n, before[i] + n, 4) != 0;
        }
        CHECK(!bad, "NaN in one column: array %zu changes in %zu elements of others", i, bad);
        if (i == H_)
            CHECK(nans == (backward ? 41 : NAN_T - 40), "NaN in one column: %zu outputs are NaN",
                  nans);
        if (i == LAST) CHECK(nans == 1, "NaN in one column: %zu last states are NaN", nans);
        free(before[i]);
        free(after);
    }
    recurrence_free(&t);
}

static void test_nan(void) {
    int v;
    for (v = 0; v < 4; v++) nan_case(v & 1, v & 2);
}

static void bits(void *user, uint64_t *h) {
    const shape *s = (const shape *)user;
    recurrence t;
    int i;
    cuda_random_restart();
    gx = cuda_ctx(STX_CUDA, cuda_precision(half));
    recurrence_make(&t, s);
    on_gpu(&t);
    CHECK(stx_ok(gx), "bits: %s", stx_error(gx));
    for (i = H_; i < ARRAYS; i++)
        if ((i != DV_ || s->V) && (i != DXR || t.s.dxr)) *h = cuda_hash(gx, t.a[i].d, t.a[i].n, *h);
    recurrence_free(&t);
    stx_destroy(gx);
}

/* All runs must be bit-identical, in every thread order. */
static void test_bits(void) {
    static const shape s[] = {{2, 200, 72, 2, 3, 0, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1, 0},
                              {1, 300, 40, 1, 4, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 0},
                              {3, 290, 33, 1, 3, 0, 1, 0, 0, 1, 1, 1, 1, 1, 2, 0, 1, 0},
                              {3, 33, 10008, 1, 3, 0, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1, 0}};
    size_t i;
    for (i = 0; i < COUNT(s) - (brief || off ? 1 : 0); i++)
        cuda_orders("recurrence", bits, (void *)(uintptr_t)(s + i));
}

enum { OP_B = 2, OP_T = 37, OP_O = 24, OP_OUT = 7 };

/* Sizes of z, last, and the gradients of u, xr, c0, v and alpha. */
static const size_t op_size[OP_OUT] = {OP_B * OP_T * OP_O,     OP_B * OP_O,
                                       OP_B * OP_T * 3 * OP_O, OP_B * OP_T * OP_O,
                                       OP_B * OP_O,            2 * OP_O,
                                       1};

typedef struct op_inputs {
    float *u, *xr, *c0, *w;
    int32_t pad[OP_B * OP_T];
} op_inputs;

static void op_inputs_make(op_inputs *in) {
    int i;
    memset(in, 0, sizeof *in);
    in->u = cuda_random(op_size[2], 2, 0);
    in->xr = cuda_random(op_size[0], 1, 0);
    in->c0 = cuda_random(op_size[1], 1, 0);
    in->w = cuda_random(op_size[0], 1, 0);
    for (i = 30; i < OP_T; i++) in->pad[OP_T + i] = 1;
    if (!half) return;
    cuda_round(in->u, op_size[2]);
    cuda_round(in->xr, op_size[0]);
    cuda_round(in->c0, op_size[1]);
    cuda_round(in->w, op_size[0]);
}

static void block_check(stx_ctx *x, int device) {
    stx_real *block = stx_block_f32(x, 5);
    float v[5] = {1, 1, 1, 1, 1};
    int i;
    CHECK(block && (device == STX_CPU || !stx_cuda_is_bf16(x, block)), "stx_block_f32 is not f32");
    stx_download(x, v, block, 5);
    for (i = 0; i < 5; i++) CHECK(v[i] == 0, "stx_block_f32 is not zero");
    stx_block_device_free(x, block);
}

/* Runs the op in a graph, with a mask that is drawn once for all time steps. out
   receives the results and the gradients. */
static void op_run(const op_inputs *in, int device, float **out) {
    stx_ctx *x = cuda_ctx(device, device == STX_CUDA ? cuda_precision(half) : STX_PREC_F32);
    stx_params *p = stx_params_create(x);
    stx_tensor *bias = stx_param(p, STX_NORMAL, 0.3, "bias", 2, OP_O, 0, 0);
    stx_tensor *v = stx_param(p, STX_NORMAL, 0.5, "v", 2, OP_O, 0, 0);
    stx_tensor *alpha = stx_param(p, STX_CONSTANT, 0.4, "alpha", 1, 0, 0, 0);
    stx_tensor *u, *xr, *c0, *w, *last, *y, *z, *loss;
    stx_sru_recurrence_in cell;
    block_check(x, device);
    stx_begin(x, STX_TRAIN);
    u = stx_variable(x, in->u, OP_B, OP_T, 3, OP_O);
    xr = stx_variable(x, in->xr, OP_B, OP_T, OP_O, 0);
    c0 = stx_variable(x, in->c0, OP_B, OP_O, 0, 0);
    w = stx_input(x, in->w, OP_B, OP_T, OP_O, 0);
    memset(&cell, 0, sizeof cell);
    cell.u = u;
    cell.xr = stx_dropout_variational(x, xr, 0.3);
    cell.v = v;
    cell.bias = bias;
    cell.c0 = c0;
    cell.pad = stx_tokens(x, in->pad, OP_B, OP_T);
    cell.alpha = 1.3;
    cell.directions = 2;
    cell.mask = stx_new_f32(x, OP_B, OP_O, 0, 0);
    if (cell.mask) {
        STX_RUN(x, stx_fill, (x, cell.mask->data, OP_B * OP_O, 1));
        cell.mask = stx_dropout(x, cell.mask, 0.25);
    }
    y = stx_sru_recurrence(x, &cell, &last);
    z = stx_rezero(x, xr, y, alpha);
    loss = stx_add(x, stx_scale(x, stx_mean(x, stx_mul(x, z, w)), 100), stx_mean(x, last));
    stx_backward(x, loss);
    CHECK(stx_ok(x), "op: %s", stx_error(x));
    if (stx_ok(x)) {
        stx_get(x, z, out[0]);
        stx_get(x, last, out[1]);
        stx_download(x, out[2], u->grad, op_size[2]);
        stx_download(x, out[3], xr->grad, op_size[3]);
        stx_download(x, out[4], c0->grad, op_size[4]);
        stx_download(x, out[5], v->grad, op_size[5]);
        stx_download(x, out[6], alpha->grad, 1);
    }
    stx_destroy(x);
}

static void test_ops(void) {
    float *out[2][OP_OUT];
    op_inputs in;
    int i, d;
    op_inputs_make(&in);
    for (d = 0; d < 2; d++) {
        for (i = 0; i < OP_OUT; i++) out[d][i] = (float *)calloc(op_size[i], sizeof(float));
        op_run(&in, d ? STX_CUDA : STX_CPU, out[d]);
    }
    for (i = 0; i < OP_OUT; i++) {
        double top = cuda_largest(out[0][i], op_size[i], 1e-3);
        double worst = max_difference(out[1][i], out[0][i], op_size[i]);
        CHECK(worst <= (half ? 2e-2 : 1e-5) * top && top > 1e-3, "op, result %d: error %g of %g", i,
              worst, top);
        free(out[0][i]);
        free(out[1][i]);
    }
    free(in.u);
    free(in.xr);
    free(in.c0);
    free(in.w);
}

static void test_rezero(void) {
    static const size_t sizes[] = {1, 3, 4, 33, 1000, 4099, 70001};
    size_t k;
    int add;
    /* large sums may cancel by chance; a fixed sequence avoids that */
    cuda_random_restart();
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
    stx_sru_fwd_cuda(x, &a); /* without batch rows, there is nothing to do */
    stx_sru_bwd_cuda(x, &a);
    CHECK(stx_ok(x), "no rows: %s", stx_error(x));
    a.B = 1;
    a.k = 5;
    stx_sru_fwd_cuda(x, &a);
    CHECK(!stx_ok(x) && strstr(stx_error(x), "stx_sru_fwd"), "expected an error for k 5");
    stx_destroy(x);
}

int main(int argc, char **argv) {
    const char *part = argc > 1 ? argv[1] : "";
    brief = argc > 1 && !strcmp(argv[argc - 1], "short");
    if (!strcmp(part, "short")) part = "";
    cx = cuda_ctx(STX_CPU, STX_PREC_F32);
    for (half = 0; half < 2; half++) {
        gx = cuda_ctx(STX_CUDA, cuda_precision(half));
        CHECK(stx_ok(gx), "%s", stx_error(gx));
        for (off = 0; off < 2 && stx_ok(gx); off++) {
            if (PART("sizes")) test_sizes();
            if (PART("options")) test_options();
            if (PART("wide")) test_wide();
            if (PART("columns")) test_columns();
            if (PART("nan")) test_nan();
            if (PART("rezero")) test_rezero();
        }
        stx_destroy(gx);
        for (off = 0; off < 2 && PART("bits"); off++) test_bits();
        if (PART("ops")) test_ops();
    }
    if (PART("refused")) test_refused();
    stx_destroy(cx);
    return cuda_test_end();
}
