/* test_cuda_par.c - PAR on a GPU: its CUDA kernels compared with the CPU kernels, with
   odd sizes, misaligned arrays, guard elements around them, and several thread orders;
   small models with every option, trained on both devices; replayed steps; generation.
   "short" omits the large cases. */
#include "../../seqtx_par.h"
#include "cuda_arr.h"

static int brief; /* whether "short" was given, as with sanitizers, which are slow */

// >>gate

static stx_real *values_of(const arr *a, size_t device, int k) {
    return device ? a[k].d : a[k].c;
}

enum { AL, TAU, UNIFORM, COST, BEFORE, W, Y, LAT, DW, DLAT, DAL, DBEFORE, GATES };

typedef struct gate {
    arr a[GATES];
    stx_par_gate_args c, d;
} gate;

static void gate_point(gate *t) {
    size_t i;
    for (i = 0; i < 2; i++) {
        stx_par_gate_args *g = i ? &t->d : &t->c;
        g->al = values_of(t->a, i, AL);
        g->tau = values_of(t->a, i, TAU);
        g->cost = values_of(t->a, i, COST);
        g->w = values_of(t->a, i, W);
        g->y = values_of(t->a, i, Y);
        if (g->lat) g->lat = values_of(t->a, i, LAT);
        if (g->uniforms) g->uniforms = values_of(t->a, i, UNIFORM);
        if (g->before) g->before = values_of(t->a, i, BEFORE);
        if (g->dw) g->dw = values_of(t->a, i, DW);
        if (g->dlat) g->dlat = values_of(t->a, i, DLAT);
        if (g->dal) g->dal = values_of(t->a, i, DAL);
        if (g->dbefore) g->dbefore = values_of(t->a, i, DBEFORE);
    }
}

/* How the parameters and the noise of a gate are initialised. */
enum { GATE_RANDOM, GATE_EQUAL, GATE_FAR, GATE_NAN };

/* Number of branches of the gates */
static size_t branches = 3;

/* Returns the number of elements of array i of a gate with R draws. */
static size_t gate_size(int i, size_t R) {
    if (i == W || i == Y || i == DW) return branches * R;
    return i == DAL ? branches : 1;
}

/* Creates the arrays of a gate. With GATE_EQUAL, all parameters and all noise values
   are equal, so the first branch wins. With GATE_FAR, the parameters are far apart. */
static void gate_make(gate *t, size_t R, int form, int how, int injected) {
    static const float far_[6] = {-90, 60, 88, 87, -3, 1},
                       equal[6] = {0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f},
                       costs[6] = {1.7f, 0.6f, 0, 2.3f, 0.1f, 0.9f};
    size_t i, stride = branches + R % 4;
    memset(t, 0, sizeof *t);
    t->c.R = R;
    if (branches != 3) t->c.branches = (int)branches;
    t->c.uniforms_stride = stride;
    t->c.form = form;
    t->c.seed = 7 + R;
    t->c.stream = R << 20;
    t->c.first = 5 * R;
    t->a[AL] = arr_of(branches, form == STX_PAR_FORM_PI ? 0.6 : 2, 0, P_);
    if (how == GATE_EQUAL) memcpy(t->a[AL].c, equal, branches * sizeof *equal);
    if (how == GATE_FAR) memcpy(t->a[AL].c, far_, branches * sizeof *far_);
    if (how == GATE_NAN) t->a[AL].c[1] = NAN;
    /* A parameter that is 0 has a gradient; negative parameters have none. */
    if (form == STX_PAR_FORM_PI && how == GATE_RANDOM && R % 3 == 0) t->a[AL].c[R % 2] = 0;
    arr_upload(&t->a[AL]);
    t->a[TAU] = arr_of(1, 1, 0, B_);
    t->a[TAU].c[0] = (float)(0.2 + (double)(R % 5) / 3);
    arr_upload(&t->a[TAU]);
    t->a[UNIFORM] = arr_of(R * stride, 0.5, 0, B_);
    for (i = 0; i < R * stride; i++) {
        t->a[UNIFORM].c[i] += 0.5f;
        if (how == GATE_EQUAL)
            t->a[UNIFORM].c[i] = t->a[UNIFORM].c[i / stride * stride];
        else if (i % 13 == 2)
            t->a[UNIFORM].c[i] = i % 2 ? 5.9604645e-8f : 0.99999994f;
    }
    arr_upload(&t->a[UNIFORM]);
    t->a[COST] = arr_from(costs, branches, B_);
    for (i = BEFORE; i < GATES; i++) t->a[i] = arr_of(gate_size((int)i, R), 1, 0, B_);
    t->c.uniforms = injected ? t->a[UNIFORM].c : NULL;
    t->c.dw = t->c.dlat = t->c.dal = t->c.dbefore = t->a[DW].c;
    t->d = t->c;
    gate_point(t);
}

static void gate_free(gate *t) {
    int i;
    for (i = 0; i < GATES; i++) arr_free(t->a + i);
}

static int gate_how(size_t n) {
    if (n % 9 == 4) return GATE_EQUAL;
    if (n % 9 == 7) return GATE_FAR;
    return n % 17 == 8 ? GATE_NAN : GATE_RANDOM;
}

/* Creates the gate of case n: selects the options and the gradients that are not
   requested. */
static void gate_case(gate *t, size_t n, size_t R) {
    int form = n / 2 % 2 ? STX_PAR_FORM_PI : STX_PAR_FORM_LOGITS, how = gate_how(n);
    gate_make(t, R, form, how, n % 3 == 1 || how == GATE_EQUAL);
    t->c.hard = (int)(n / 4 % 2);
    t->c.noisy = n % 5 != 3;
    if (n / 3 % 3) t->c.lat = t->a[LAT].c;
    if (n / 3 % 3 == 2) t->c.latency_w = STX_PAR_LATENCY_OF_W;
    if (n % 2) t->c.before = t->a[BEFORE].c;
    if (n % 7 == 6) t->c.dw = NULL;
    if (n % 7 == 5) t->c.dlat = NULL;
    if (n % 11 == 3) t->c.dal = NULL;
    if (n % 5 == 1) t->c.dbefore = NULL;
    t->d = t->c;
    gate_point(t);
    if (n % 8 == 1 && !t->c.hard) {
        t->c.y = t->c.w;
        t->d.y = t->d.w;
    }
}

static void test_gates(void) {
    static const size_t draws[] = {1, 2, 3, 31, 32, 33, 127, 255, 256, 257, 1, 600, 1031, 2053};
    /* In double, e^x may differ by one unit in the last place between host and device,
       and so may the result in f32. */
    const double tol = 1.3e-7;
    size_t n;
    int k;
    char name[128];
    for (n = 0; n < (brief ? 24 : 112); n++) {
        size_t R = draws[n % COUNT(draws)];
        gate t;
        if (brief && R > 260) R = 7;
        gate_case(&t, n, R);
        snprintf(name, sizeof name,
                 "gate, %zu branches, R %zu form %d how %d hard %d noisy %d latency %d of w %d",
                 branches, R, t.c.form, gate_how(n), t.c.hard, t.c.noisy, t.c.lat != NULL,
                 t.c.latency_w);
        BOTH(stx_par_gate_fwd, (cx, &t.c), (gx, &t.d));
        arr_check(name, &t.a[Y], tol);
        arr_check(name, &t.a[W], t.c.hard ? 0 : tol);
        arr_check(name, &t.a[LAT], tol);
        for (k = 0; k < 2; k++) {
            snprintf(name, sizeof name,
                     "gate, R %zu form %d how %d noisy %d latency %d of w %d, backward %d", R,
                     t.c.form, gate_how(n), t.c.noisy, t.c.lat != NULL, t.c.latency_w, k);
            BOTH(stx_par_gate_bwd, (cx, &t.c), (gx, &t.d));
            arr_check(name, &t.a[DAL], tol);
            arr_check(name, &t.a[DBEFORE], 0);
        }
        for (k = 0; k < GATES; k++)
            if (k != W && k != Y && k != LAT && k != DAL && k != DBEFORE)
                arr_check("input of a gate", t.a + k, 0);
        gate_free(&t);
    }
}

/* A replayed step must draw from other random streams. */
static void test_gate_streams(void) {
    size_t n;
    for (n = 0; n < 3; n++) {
        gate t;
        gate_make(&t, 37, STX_PAR_FORM_LOGITS, GATE_RANDOM, 0);
        t.c.noisy = t.d.noisy = 1;
        stx_cuda_rng_shift(gx, (uint64_t)n << 24);
        t.c.stream += (uint64_t)n << 24;
        BOTH(stx_par_gate_fwd, (cx, &t.c), (gx, &t.d));
        arr_check("gate with shifted streams", &t.a[W], 1.3e-7);
        stx_cuda_rng_shift(gx, 0);
        gate_free(&t);
    }
}


// >>mix

enum {
    H,
    B0,
    B1,
    G0,
    S0,
    G1,
    S1,
    WEIGHTS,
    OUT,
    MEAN0,
    MEAN1,
    RSTD0,
    RSTD1,
    DY,
    DH,
    DB0,
    DB1,
    DWEIGHTS,
    DG0,
    DS0,
    DG1,
    DS1,
    ARRAYS
};

static const char *const mix_names[ARRAYS] = {"h",      "b0",     "b1",    "gain0",  "shift0",
                                              "gain1",  "shift1", "w",     "y",      "mean0",
                                              "mean1",  "rstd0",  "rstd1", "dy",     "dh",
                                              "db0",    "db1",    "dw",    "dgain0", "dshift0",
                                              "dgain1", "dshift1"};

typedef struct mix {
    arr a[ARRAYS];
    double *work, *dwork;
    stx_par_mix_args c, d;
} mix;

/* Sets the array pointers in the arguments for the CPU (i = 0) and for the GPU (i = 1).
   NULL pointers stay NULL. */
static void mix_point(mix *t) {
    size_t i;
    for (i = 0; i < 2; i++) {
        stx_par_mix_args *m = i ? &t->d : &t->c;
        int k;
        m->h = values_of(t->a, i, H);
        m->w = values_of(t->a, i, WEIGHTS);
        m->y = values_of(t->a, i, OUT);
        m->dy = values_of(t->a, i, DY);
        m->work = NULL;
        if (m->dw) m->work = i ? t->dwork : t->work;
        if (m->dh) m->dh = values_of(t->a, i, DH);
        if (m->dw) m->dw = values_of(t->a, i, DWEIGHTS);
        for (k = 0; k < 2; k++) {
            m->branch[k] = values_of(t->a, i, B0 + k);
            m->mean[k] = values_of(t->a, i, MEAN0 + k);
            m->rstd[k] = values_of(t->a, i, RSTD0 + k);
            if (m->gain[k]) {
                m->gain[k] = values_of(t->a, i, G0 + 2 * k);
                m->shift[k] = values_of(t->a, i, S0 + 2 * k);
            }
            if (m->dbranch[k]) m->dbranch[k] = values_of(t->a, i, DB0 + k);
            if (m->dgain[k]) m->dgain[k] = values_of(t->a, i, DG0 + 2 * k);
            if (m->dshift[k]) m->dshift[k] = values_of(t->a, i, DS0 + 2 * k);
        }
    }
}

/* Returns the number of elements of array k for N rows. *kind receives its memory
   kind. */
static size_t mix_size(int k, size_t N, size_t C, size_t draws, int *kind) {
    *kind = B_;
    if (k == H || k == B0 || k == B1 || k == OUT || (k >= DY && k <= DB1)) {
        *kind = N_;
        return N * C;
    }
    if (k == WEIGHTS || k == DWEIGHTS) return 3 * draws;
    if (k >= MEAN0 && k <= RSTD1) return N;
    if (k >= G0 && k <= S1) *kind = P_;
    return C;
}

/* Creates the arrays of a mixture. how: 0: random weights; 1 + k: only branch k has a
   nonzero weight; 4: branch 1 has weight 0 and contains NaN. whole: integers, whose
   products and sums are exact. mixed: branch 1 and its gradient are float in bf16. */
static void mix_make_of(mix *t, size_t streams, size_t T, size_t run, size_t C, int norm, int how,
                        int whole, int mixed) {
    const size_t N = streams * T, draws = streams * ((T + run - 1) / run);
    size_t i, k;
    memset(t, 0, sizeof *t);
    t->c.N = N;
    t->c.C = C;
    t->c.period = T;
    t->c.rows_per_draw = run;
    t->c.eps = 1e-3f;
    for (k = 0; k < ARRAYS; k++) {
        int kind;
        size_t n = mix_size((int)k, N, C, draws, &kind);
        if (mixed && (k == B1 || k == DB1)) kind = B_;
        t->a[k] = arr_of(n, whole ? 3 : 1, whole, kind);
    }
    for (i = 0; i < 3 * draws; i++) {
        float *w = t->a[WEIGHTS].c + i;
        if (whole) *w /= 4;
        if (how) *w = how == 4 ? i % 3 != 1 : i % 3 == (size_t)how - 1;
    }
    for (i = 0; i < N * C && how == 4; i++) t->a[B1].c[i] = NAN;
    arr_upload(&t->a[WEIGHTS]);
    arr_upload(&t->a[B1]);
    t->work = (double *)calloc(3 * N + 1, sizeof *t->work);
    t->dwork = (double *)cuda_bytes(gx, NULL, 3 * N * sizeof *t->dwork);
    t->c.dh = t->c.dw = t->c.dbranch[0] = t->c.dbranch[1] = t->a[DH].c;
    if (norm)
        for (i = 0; i < 2; i++) t->c.gain[i] = t->c.dgain[i] = t->c.dshift[i] = t->a[DH].c;
    t->d = t->c;
    mix_point(t);
}

static void mix_make(mix *t, size_t streams, size_t T, size_t run, size_t C, int norm, int how,
                     int whole) {
    mix_make_of(t, streams, T, run, C, norm, how, whole, 0);
}

static void mix_free(mix *t) {
    int i;
    for (i = 0; i < ARRAYS; i++) arr_free(t->a + i);
    free(t->work);
    stx_cuda_free(gx, t->dwork);
}

static void mix_check(const char *what, mix *t, int from, int to, double tol) {
    char name[160];
    int i;
    for (i = from; i <= to; i++) {
        snprintf(name, sizeof name, "mix %s, N %zu T %zu run %zu C %zu norm %d, %s", what, t->c.N,
                 t->c.period, t->c.rows_per_draw, t->c.C, t->c.gain[0] != NULL, mix_names[i]);
        arr_check(name, t->a + i, tol);
    }
}


/* Selects the gradients that case n does not request. */
static void mix_request(mix *t, size_t n, int norm) {
    stx_par_mix_args *c = &t->c;
    if (n % 9 == 5) c->dh = NULL;
    if (n % 9 == 6) c->dbranch[n % 2] = NULL;
    if (n % 9 == 7) c->dw = NULL;
    if (norm && n % 7 == 3) c->dgain[n % 2] = NULL;
    if (norm && n % 7 == 4) c->dshift[n / 2 % 2] = NULL;
    if (norm && n % 7 == 5) c->dshift[0] = c->dshift[1] = c->dgain[0] = c->dgain[1] = NULL;
    t->d = *c;
    mix_point(t);
}

static void mix_backward(mix *t, int norm, int whole, int add) {
    const char *what = add ? "backward +" : "backward";
    const int exact = whole && !norm;
    t->c.add_h = t->d.add_h = t->c.add[0] = t->d.add[0] = add;
    t->c.add[1] = t->d.add[1] = !add;
    BOTH(stx_par_mix_bwd, (cx, &t->c), (gx, &t->d));
    mix_check(what, t, DH, DB1, exact && !half ? 0 : 5e-6);
    least = sqrt((double)(t->c.N * t->c.C)); /* because sums have about this many terms */
    mix_check(what, t, DWEIGHTS, DWEIGHTS, exact ? 0 : 5e-6);
    least = 1;
    mix_check(what, t, DG0, DG0, 5e-6);
    mix_check(what, t, DG1, DG1, 5e-6);
    mix_check(what, t, DS0, DS0, whole ? 0 : 5e-6);
    mix_check(what, t, DS1, DS1, whole ? 0 : 5e-6);
}

static void test_mix_case(size_t n, int mixed) {
    /* streams, T, run: one draw per step, one per sequence, runs that end with the
       segment, or single tokens */
    static const size_t shape[][3] = {{1, 1, 1},   {1, 7, 7}, {3, 5, 5},   {2, 31, 7}, {3, 11, 1},
                                      {1, 67, 67}, {5, 3, 2}, {1, 33, 32}, {2, 1, 1},  {3, 2, 100}};
    static const size_t wide[] = {1,   3,   4,   31,  32,  33,  64,   67,   127,  128,  132, 252,
                                  256, 260, 301, 508, 512, 516, 1000, 1024, 1028, 2048, 2052};
    const size_t *s = shape[n % COUNT(shape)];
    const int norm = n % 3 != 2, whole = n % 5 == 1, how = n % 7 == 6 ? 1 + (int)(n / 7 % 4) : 0;
    const size_t C = wide[n % COUNT(wide)], streams = C > 200 && s[0] * s[1] > 20 ? 1 : s[0],
                 T = C > 200 && s[1] > 20 ? 9 : s[1];
    mix t;
    int k;
    mix_make_of(&t, streams, T, s[2] > T && s[2] != 100 ? T : s[2], C, norm, how, whole, mixed);
    mix_request(&t, n, norm);
    BOTH(stx_par_mix_fwd, (cx, &t.c), (gx, &t.d));
    mix_check("forward", &t, OUT, OUT, (whole && !norm) || how == 3 ? 0 : 3e-6);
    least = 1; /* because the sums cancel */
    if (norm) mix_check("forward", &t, MEAN0, RSTD1, 2e-6);
    for (k = 0; k < 2 && how != 4; k++) mix_backward(&t, norm, whole, k);
    least = 0;
    mix_check("input", &t, H, WEIGHTS, 0);
    mix_check("input", &t, DY, DY, 0);
    mix_free(&t);
}

static void test_mix(void) {
    /* with layer norms and without, and rows that fit in registers and longer ones */
    static const size_t mixed[] = {29, 43, 52};
    size_t n;
    for (n = (size_t)half ^ off; n < (brief ? 23 : 69); n += 2) test_mix_case(n, 0);
    for (n = 0; n < COUNT(mixed) && half && !off; n++) test_mix_case(mixed[n], 1);
}

/* With a single branch, the results must be bit-identical to those of
   stx_residual_norm. In bf16, stx_residual_norm rounds h + b, because it stores the
   sum. */
static void test_alone(void) {
    static const size_t wide[] = {4, 33, 36, 132, 260, 512, 516, 1028};
    size_t n;
    for (n = 0; n < COUNT(wide) && !half; n++) {
        const int which = (int)(n % 2);
        mix t;
        arr s, y, mean, rstd;
        stx_residual_norm_args a;
        uint64_t expected, got;
        mix_make(&t, 1, 5, 5, wide[n], 1, 1 + which, 0);
        s = arr_of(t.a[H].n, 1, 0, N_);
        y = arr_of(t.a[H].n, 1, 0, N_);
        mean = arr_of(5, 1, 0, B_);
        rstd = arr_of(5, 1, 0, B_);
        memset(&a, 0, sizeof a);
        a.N = 5;
        a.C = wide[n];
        a.eps = t.c.eps;
        a.h = t.d.h;
        a.f = t.d.branch[which];
        a.gain = t.d.gain[which];
        a.shift = t.d.shift[which];
        a.s = s.d;
        a.y = y.d;
        a.mean = mean.d;
        a.rstd = rstd.d;
        stx_residual_norm_fwd_cuda(gx, &a);
        stx_par_mix_fwd_cuda(gx, &t.d);
        expected = cuda_hash(gx, y.d, y.n, cuda_hash(gx, mean.d, 5, cuda_hash(gx, rstd.d, 5, 1)));
        got = cuda_hash(gx, t.d.y, y.n,
                        cuda_hash(gx, t.d.mean[which], 5, cuda_hash(gx, t.d.rstd[which], 5, 1)));
        CHECK(expected == got,
              "only branch %d, C %zu, off %zu: other bits than the layer norm's", which, wide[n],
              off);
        arr_free(&s);
        arr_free(&y);
        arr_free(&mean);
        arr_free(&rstd);
        mix_free(&t);
    }
}


// >>latency

static void test_latency(void) {
    static const float lats[] = {0, 0.5f, 1, 1.0001f, 2.5f, 3, 40, NAN, INFINITY};
    size_t n;
    for (n = 0; n < 3 * COUNT(lats); n++) {
        stx_par_latency_args a;
        arr v[6];
        int i;
        char name[96];
        a.kind = STX_PAR_LATENCY_ADD + (int)(n % 3);
        a.weight = 0.3;
        a.target = 2.5;
        a.power = n % 2 ? 0.6 : 1.5;
        /* loss, nll, lat, dnll, dlat, dloss */
        for (i = 0; i < 6; i++) v[i] = arr_of(1, 2, 0, i == 5 ? N_ : B_);
        v[2].c[0] = lats[n / 3];
        arr_upload(v + 2);
        snprintf(name, sizeof name, "latency, kind %d, %g", a.kind, (double)lats[n / 3]);
        BOTH(stx_par_latency_fwd, (cx, v[0].c, v[1].c, v[2].c, &a),
             (gx, v[0].d, v[1].d, v[2].d, &a));
        arr_check(name, v, 1.3e-7);
        for (i = 0; i < 4; i++) {
            BOTH(stx_par_latency_bwd,
                 (cx, i == 1 ? NULL : v[3].c, i == 2 ? NULL : v[4].c, v[5].c, v[1].c, v[2].c, &a),
                 (gx, i == 1 ? NULL : v[3].d, i == 2 ? NULL : v[4].d, v[5].d, v[1].d, v[2].d, &a));
            arr_check(name, v + 3, 1.3e-7);
            arr_check(name, v + 4, 1.3e-7);
        }
        for (i = 0; i < 6; i++) {
            arr_check("input of the latency", v + i, 0);
            arr_free(v + i);
        }
    }
}


// >>repeatability

static void bits(void *user, uint64_t *h) {
    static const size_t shape[][4] = {{2, 31, 31, 36}, {2, 11, 3, 67}, {1, 9, 9, 516}};
    size_t i, k;
    (void)user;
    cuda_random_restart();
    gx = cuda_ctx(STX_CUDA, cuda_precision(half));
    for (i = 0; i < 3; i++) {
        mix m;
        gate g;
        mix_make(&m, shape[i][0], shape[i][1], shape[i][2], shape[i][3], i != 1 || off, 0, 0);
        stx_par_mix_fwd_cuda(gx, &m.d);
        stx_par_mix_bwd_cuda(gx, &m.d);
        for (k = 0; k < ARRAYS; k++) *h = cuda_hash(gx, m.a[k].d, m.a[k].n, *h);
        gate_make(&g, i ? 1100 : 33, STX_PAR_FORM_LOGITS, GATE_RANDOM, 0);
        g.d.noisy = 1;
        g.d.lat = g.a[LAT].d;
        g.d.latency_w = STX_PAR_LATENCY_OF_W;
        stx_par_gate_fwd_cuda(gx, &g.d);
        stx_par_gate_bwd_cuda(gx, &g.d);
        for (k = 0; k < GATES; k++) *h = cuda_hash(gx, g.a[k].d, g.a[k].n, *h);
        mix_free(&m);
        gate_free(&g);
    }
    CHECK(stx_ok(gx), "bits: %s", stx_error(gx));
    stx_destroy(gx);
}


// >>models

typedef struct model {
    stx_ctx *x;
    stx_par *m;
    stx_optim *o, *gates; /* o: for the weights; gates: for the gate parameters */
    stx_par_state *s;
    stx_ids *in, *out;
    size_t B, T, V;
    int given; /* whether the test supplies the noise */
    double rate, loss;
} model;

enum { WORDS = 23, FIRST = 7 }; /* WORDS: the vocabulary size; FIRST: the number of words
                                   in the first cluster */

enum { SOFT, HARD, RUNS, REFERENCE, FIXED, AGAIN, FORMS, TYPES, MODELS };

static const char *const model_names[MODELS] = {
    "soft, a draw per step, hinge",
    "hard, pi, draws per stream, before, latency of w",
    "draws per run, adaptive words",
    "the reference",
    "fixed",
    "recomputation, dropout",
    "learned with a bias, no last norm, one projection",
    "two more block types"};

/* A causal convolution over two rows, with a memory of one row */
static size_t conv_weights(void *user, const stx_par_desc *d, size_t l, stx_weight *w) {
    (void)user;
    (void)l;
    w[0].name = "weight";
    w[0].rows = d->dim;
    w[0].columns = 2 * d->dim;
    w[0].init = STX_NORMAL;
    w[0].a = 0.2;
    return 1;
}

static stx_tensor *conv_forward(stx_ctx *x, void *user, const stx_par_branch *in,
                                stx_tensor **state) {
    stx_tensor *rows = stx_concat(x, in->past, in->h);
    (void)user;
    *state = in->h;
    rows = stx_concat_channels(x, stx_slice(x, rows, 0, in->h->dim[1]), in->h);
    return stx_linear(x, rows, in->w[0], NULL, STX_ACT_TANH);
}

/* A branch without weights and memory */
static stx_tensor *gelu_forward(stx_ctx *x, void *user, const stx_par_branch *in,
                                stx_tensor **state) {
    (void)user;
    (void)state;
    return stx_gelu(x, in->h);
}

static const stx_par_type model_types[] = {
    {'c', "conv", conv_weights, conv_forward, NULL, 1, 0, 2, 0},
    {'e', "gelu", NULL, gelu_forward, NULL, 0, 0, 0.5, 0.1}};

static size_t model_blocks = 2;
static const char *model_pattern = "sfisf"; /* the pattern of the models FIXED and FORMS */
/* dim of all models except SOFT and HARD, whose 16-channel heads use the fused
   attention */
static size_t model_dim = 20;

static void model_options(stx_par_desc *d, int which) {
    switch (which) {
    case SOFT:
        d->latency = STX_PAR_LATENCY_HINGE;
        d->latency_target = 0.5;
        break;
    case HARD:
        d->gate = STX_PAR_ST;
        d->gate_form = STX_PAR_FORM_PI;
        d->noise = STX_PAR_NOISE_SEQUENCE;
        d->pre_norm = 1;
        d->own_uv = 1;
        d->latency = STX_PAR_LATENCY_ADD;
        d->latency_w = STX_PAR_LATENCY_OF_W;
        break;
    case RUNS:
        d->noise = STX_PAR_NOISE_TOKENS;
        d->noise_tokens = 3;
        d->positions = STX_PAR_LEARNED;
        d->latency = STX_PAR_LATENCY_FBNET;
        d->cost[0] = 5;
        d->cost[1] = 3;
        d->adaptive_in = 1;
        d->words_out = STX_PAR_OUT_ADAPTIVE;
        d->cutoff[0] = FIRST;
        d->cutoffs = 1;
        d->div_val = 2;
        break;
    case REFERENCE:
        stx_par_reference(d);
        d->cutoff[0] = FIRST;
        d->cutoffs = 1;
        break;
    case FIXED:
        d->pattern = model_pattern;
        d->blocks = 0;
        break;
    case AGAIN:
        d->recompute_layers = SIZE_MAX;
        d->dropout = d->attn_dropout = d->inner_dropout = d->pos_dropout = d->final_dropout = 0.1;
        break;
    case FORMS:
        d->pattern = model_pattern;
        d->blocks = 0;
        d->positions = STX_PAR_LEARNED_BIAS;
        d->pre_norm = d->no_final_norm = d->own_uv = 1;
        d->adaptive_in = d->tie_words = d->one_proj = 1;
        d->words_out = STX_PAR_OUT_ADAPTIVE;
        d->tie_projs = STX_PAR_TIE_BUT_FIRST;
        d->cutoff[0] = FIRST;
        d->cutoffs = 1;
        d->emb = 12;
        break;
    case TYPES:
        d->type = model_types;
        d->types = 2;
        d->noise = STX_PAR_NOISE_SEQUENCE;
        d->latency = STX_PAR_LATENCY_ADD;
        break;
    }
}

static void model_make(model *r, int which, int device, int precision, int no_graph) {
    stx_par_desc d;
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
    r->T = 8;
    r->V = WORDS;
    d.vocab = r->V;
    d.dim = which == SOFT || which == HARD ? 32 : model_dim;
    d.heads = 2;
    d.inner = 40;
    d.blocks = model_blocks;
    d.segment = r->T;
    d.mem = 12;
    d.words_out = STX_PAR_OUT_PLAIN;
    d.cost[0] = 1.7;
    d.cost[1] = 0.6;
    d.latency_weight = 0.1;
    d.init_std = 0.2;
    d.tau = 1;
    model_options(&d, which);
    r->m = stx_par_create(r->x, &d);
    CHECK(stx_ok(r->x), "%s, device %d: %s", model_names[which], device, stx_error(r->x));
    od.kind = STX_SGD;
    od.clip = 1;
    od.momentum = 0.9;
    r->o = stx_optim_create(r->m->params, &od);
    od.kind = STX_ADAM;
    od.clip = 0;
    /* large compared with rounding errors of the gradients */
    od.eps = 1e-3;
    r->gates = r->m->gates ? stx_optim_create(r->m->gates, &od) : NULL;
    r->s = stx_par_state_create(r->m, r->B);
    r->given = which == SOFT && model_blocks == 2;
    r->in = stx_tokens_create(r->x, r->B, r->T);
    r->out = stx_tokens_create(r->x, r->B, r->T);
    CHECK(stx_ok(r->x), "%s, device %d: %s", model_names[which], device, stx_error(r->x));
}

static void model_free(model *r) {
    stx_par_state_free(r->s);
    stx_destroy(r->x);
}

/* The step key contains the cluster sizes. Therefore, all steps have words of the first
   cluster at the same positions. */
static int32_t *tokens_of(size_t n, size_t salt) {
    int32_t *id = (int32_t *)malloc((n + 1) * sizeof *id);
    size_t i;
    for (i = 0; i < n; i++) {
        size_t v = i * i * 31 + i * 17 + salt * 7 + i / 3;
        id[i] = (int32_t)(i % 3 ? FIRST + v % (WORDS - FIRST) : v % FIRST);
    }
    return id;
}

static void model_step(void *user) {
    model *r = (model *)user;
    stx_tensor *loss;
    stx_begin(r->x, STX_TRAIN);
    loss = stx_par_total(r->m, stx_par_loss(r->m, r->in, r->out, r->s, r->s));
    stx_metric_set(r->x, 0, loss, 1, 0);
    stx_backward(r->x, loss);
    stx_optim_step(r->o, r->rate);
    if (r->gates) stx_optim_step(r->gates, r->rate / 2);
}

/* Runs step n. Temperature, learning rates, tokens and noise change in every step. */
static double model_run(model *r, int n) {
    int32_t *id = tokens_of(r->B * r->T + 1, (size_t)n + 1);
    stx_tokens_set(r->x, r->in, id);
    stx_tokens_set(r->x, r->out, id + 1);
    if (r->gates) stx_par_set_tau(r->m, 1.5 / (1 + 0.2 * n));
    if (r->given) {
        stx_real u[6];
        int i;
        for (i = 0; i < 6; i++) u[i] = (stx_real)((double)((29 * n + 13 * i) % 64 + 1) / 66);
        stx_par_set_uniforms(r->m, u, 6);
    }
    r->rate = 0.05 / (1 + 0.1 * n);
    stx_optim_set_lr(r->o, r->rate);
    if (r->gates) stx_optim_set_lr(r->gates, r->rate / 2);
    stx_step_run(r->x, stx_par_key(r->m, r->in, r->out, r->s, 0), model_step, r);
    free(id);
    r->loss = stx_metric_get(r->x, 0);
    return r->loss;
}

/* Runs step n with padding vectors and with a stream that restarts occasionally. Every
   third step is shorter. */
static double model_padded(model *r, int n) {
    size_t T = n % 3 == 2 ? r->T - 3 : r->T, b, i;
    int32_t *id = tokens_of(r->B * T + 1, (size_t)n + 1),
            *pad = (int32_t *)calloc(r->B * T, sizeof *pad);
    stx_tensor *h, *loss;
    stx_ids *p;
    double v;
    if (n % 4 == 3) stx_par_state_reset_stream(r->s, (size_t)n / 4 % r->B);
    for (b = 0; b < r->B; b++)
        for (i = 0; i < T; i++) pad[b * T + i] = n % 2 && b == 1 && (i < 3 || i == 5);
    stx_begin(r->x, STX_TRAIN);
    p = stx_tokens(r->x, pad, r->B, T);
    h = stx_par_segment(r->m, stx_par_embed(r->m, stx_tokens(r->x, id, r->B, T)), p, r->s, r->s);
    for (i = 0; i < r->B * T; i++)
        if (pad[i]) id[i + 1] = -1;
    loss = stx_par_total(r->m, stx_par_nll(r->m, h, stx_tokens(r->x, id + 1, r->B, T), NULL));
    v = stx_item(r->x, loss);
    stx_backward(r->x, loss);
    stx_optim_step(r->o, 0.05);
    if (r->gates) stx_optim_step(r->gates, 0.02);
    free(id);
    free(pad);
    return v;
}

static void params_check(const char *what, const model *a, const model *b) {
    size_t k, i;
    for (k = 0; k < 2; k++) {
        const stx_params *p = k ? a->m->gates : a->m->params, *q = k ? b->m->gates : b->m->params;
        for (i = 0; p && i < p->count; i++) {
            double e = cuda_error(b->x, q->tensor[i]->data, p->tensor[i]->data, p->tensor[i]->size,
                                  1e-3);
            CHECK(e <= 3e-4, "%s: error %g in %s", what, e, p->name[i]);
        }
    }
}

/* Trains a model of each kind for a few steps on the CPU and on the GPU and compares
   the losses and, in f32, the parameters and memories. (The golden vectors cover all of
   this in f32, but nothing in bf16.) */
static void compare_models(int which, int half_, int padded) {
    const char *name = model_names[which];
    const double tol = half_ ? 3e-2 : 1e-4;
    model a, b;
    size_t l;
    int n;
    model_make(&a, which, STX_CPU, STX_PREC_F32, 0);
    model_make(&b, which, STX_CUDA, cuda_precision(half_), 0);
    for (n = 0; n < 6 && stx_ok(b.x); n++) {
        double la = padded ? model_padded(&a, n) : model_run(&a, n),
               lb = padded ? model_padded(&b, n) : model_run(&b, n);
        CHECK(stx_ok(a.x) && stx_ok(b.x), "%s, step %d: %s%s", name, n, stx_error(a.x),
              stx_error(b.x));
        CHECK(fabs(la - lb) <= tol * fabs(la),
              "%s, bf16 %d, padded %d, step %d: loss %.7f on the CPU, %.7f on the GPU", name, half_,
              padded, n, la, lb);
    }
    if (!half_) params_check(name, &a, &b);
    for (l = 0; l < a.m->desc.blocks && stx_ok(b.x); l++)
        cuda_check_memory(name, b.x, b.s->mem, a.s->mem, l, half_ ? 0 : 3e-4);
    for (l = 0; a.s->own && l < 2 * a.m->desc.blocks && stx_ok(b.x); l++)
        cuda_check_memory(name, b.x, b.s->own, a.s->own, l, half_ ? 0 : 3e-4);
    model_free(&a);
    model_free(&b);
}

static void test_models(void) {
    /* models that are tested in f32: bit 0 without padding, bit 1 with padding */
    static const int in_f32[MODELS] = {3, 2, 1, 2, 1, 1, 3, 3};
    int which, half_, padded;
    for (half_ = 0; half_ < 2; half_++)
        for (which = 0; which < MODELS; which++)
            for (padded = 0; padded < 2; padded++) {
                int runs = half_ ? padded == which % 2 : in_f32[which] >> padded & 1;
                if (runs && (!brief || which == half_)) compare_models(which, half_, padded);
            }
}

/* A replayed step must be bit-identical to a launched step, although noise,
   temperature, learning rates and tokens change between steps. */
static void test_graph(void) {
    static const int models[] = {SOFT, HARD, RUNS, AGAIN, FORMS};
    size_t k;
    int n;
    for (k = 0; k < COUNT(models); k++) {
        int which = models[k];
        model a, b;
        uint64_t ha = 1, hb = 1;
        long replays = cuda_replays();
        if (brief && which != SOFT) continue;
        model_make(&a, which, STX_CUDA, STX_PREC_F32, 1);
        model_make(&b, which, STX_CUDA, STX_PREC_F32, 0);
        for (n = 0; n < 10; n++) {
            double la = model_run(&a, n), lb = model_run(&b, n);
            CHECK(la == lb, "%s, step %d: %.9g launched, %.9g replayed: %s", model_names[which], n,
                  la, lb, stx_error(b.x));
            /* An evaluation in the same arenas, so that a sanitizer detects a replay that
               uses freed memory. */
            if (n == 7 && !brief) {
                stx_begin(b.x, STX_EVAL);
                CHECK(isfinite(stx_item(b.x, stx_par_loss(b.m, b.in, b.out, NULL, NULL))),
                      "an evaluation between replays");
            }
        }
        ha = cuda_hash_params(a.x, a.m->params, ha);
        hb = cuda_hash_params(b.x, b.m->params, hb);
        if (a.m->gates) {
            ha = cuda_hash_params(a.x, a.m->gates, ha);
            hb = cuda_hash_params(b.x, b.m->gates, hb);
        }
        CHECK(ha == hb, "%s: replays give other parameters", model_names[which]);
        CHECK(!*stx_step_replay_status(b.x), "%s: steps are not replayed: %s", model_names[which],
              stx_step_replay_status(b.x));
        replays = cuda_replays() - replays;
        if (CUDA_ON_HOST)
            CHECK(replays >= 5, "%s: %ld replays of 10 steps", model_names[which], replays);
        model_free(&a);
        model_free(&b);
    }
}

#ifdef SEQTX_CUDA_HOST
static int print_nodes; /* set by build/test_cuda_par nodes */

/* Counts, as in test_cuda_model.c, the graph nodes of a mixture during the search, and
   of an attention layer followed by a feed-forward layer. */
static void test_nodes(void) {
    static const struct {
        int which;
        long nodes;
    } expected[] = {{SOFT, 37}, {FIXED, 32}};

    size_t i;
    for (i = 0; i < COUNT(expected); i++) {
        cuda_nodes all;
        int k, n;
        memset(&all, 0, sizeof all);
        for (k = 0; k < 2; k++) {
            model r;
            model_blocks = (size_t)(3 + k);
            model_pattern = k ? "sfsfsf" : "sfsf";
            model_dim = 32;
            model_make(&r, expected[i].which, STX_CUDA, STX_PREC_BF16, 0);
            for (n = 0; n < 12; n++) model_run(&r, n);
            CHECK(stx_ok(r.x) && !*stx_step_replay_status(r.x), "%s: %s%s",
                  model_names[expected[i].which], stx_error(r.x), stx_step_replay_status(r.x));
            cuda_nodes_add(&all, k);
            model_free(&r);
        }
        cuda_nodes_check(&all, model_names[expected[i].which], expected[i].which == SOFT ? 3 : 2,
                         expected[i].nodes, print_nodes);
    }
    model_blocks = 2;
    model_pattern = "sfisf";
    model_dim = 20;
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
        stx_par_gen *ga, *gb;
        int32_t *id;
        size_t at, n;
        /* REFERENCE draws branches during evaluation, too, so it cannot generate. */
        if (which == REFERENCE || (brief && which != FIXED)) continue;
        model_make(&a, which, STX_CPU, STX_PREC_F32, 0);
        model_make(&b, which, STX_CUDA, STX_PREC_F32, 0);
        ga = stx_par_gen_create(a.m, 2);
        gb = stx_par_gen_create(b.m, 2);
        id = tokens_of(2 * 40, 2);
        for (at = 0; at < 30; at += n) {
            const stx_real *la, *lb;
            n = fed_at(at);
            if (at == 23) {
                stx_par_gen_reset_stream(ga, 1);
                stx_par_gen_reset_stream(gb, 1);
            }
            la = stx_par_gen_feed(ga, id, n);
            lb = stx_par_gen_feed(gb, id, n);
            CHECK(la && lb, "%s: %s%s", model_names[which], stx_error(a.x), stx_error(b.x));
            if (la && lb)
                CHECK(max_difference(la, lb, 2 * a.V) < 1e-4, "%s, token %zu: logits differ by %g",
                      model_names[which], at, max_difference(la, lb, 2 * a.V));
        }
        free(id);
        stx_par_gen_free(ga);
        stx_par_gen_free(gb);
        model_free(&a);
        model_free(&b);
    }
}

static void refused(int which, const char *expected) {
    stx_par_mix_args m;
    stx_par_gate_args g;
    stx_ctx *x = cuda_ctx(STX_CUDA, STX_PREC_F32);
    memset(&m, 0, sizeof m);
    memset(&g, 0, sizeof g);
    m.N = m.C = m.period = m.rows_per_draw = 1;
    g.R = ((size_t)1 << 36) + 1;
    if (which == 0) {
        m.period = 0;
        stx_par_mix_fwd_cuda(x, &m);
    }
    if (which == 1) {
        m.rows_per_draw = 0;
        stx_par_mix_bwd_cuda(x, &m);
    }
    if (which == 2) stx_par_gate_fwd_cuda(x, &g);
    if (which == 3) stx_par_gate_bwd_cuda(x, &g);
    CHECK(!stx_ok(x) && strstr(stx_error(x), expected), "case %d: expected an error of %s, got %s",
          which, expected, stx_error(x));
    stx_destroy(x);
}

static void test_refused(void) {
    static const char *const expected[] = {"stx_par_mix_fwd", "stx_par_mix_bwd",
                                           "stx_par_gate_fwd", "stx_par_gate_bwd"};
    stx_ctx *x = cuda_ctx(STX_CUDA, STX_PREC_F32);
    stx_par_mix_args m;
    int i;
    memset(&m, 0, sizeof m);
    stx_par_mix_fwd_cuda(x, &m); /* nothing to do */
    m.N = 3;
    stx_par_mix_bwd_cuda(x, &m);
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
            for (branches = 3; branches <= STX_PAR_MAX_BRANCHES && PART("gates"); branches++) {
                test_gates();
                test_gate_streams();
            }
            branches = 3;
            if (PART("mix")) test_mix();
            if (PART("alone")) test_alone();
            if (PART("latency")) test_latency();
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
