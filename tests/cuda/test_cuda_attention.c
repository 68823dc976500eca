/* test_cuda_attention.c - stx_attention_fwd_cuda and stx_attention_bwd_cuda compared
   with their CPU twins in f32 and in bf16: every attention feature and many
   combinations, computed by version 0 (with all of its scratch and with little) and by
   the fused kernels where they support the call. Also: dropout masks cell by cell,
   masked keys and queries, omitted gradients, memory between rows, repeatability. */
#include "../../seqtx.h"
#include "../values.h"
#include "cuda_test.h"
#ifdef SEQTX_CUDA_HOST
  #include "../../seqtx_attn_span.h"
  #include "../../bench/cuda/cuda_model.h"
  #include "../inner/inner.h"
#endif


// >>cases

/* How the span fractions z are chosen. */
enum {
    Z_NONE,
    Z_MIXED,
    Z_SHORT,    /* all spans are short */
    Z_ONE_LONG, /* one span is long, the rest are short */
    Z_ENDS,     /* z at both ends and in the middle of the ramp */
    Z_BEYOND    /* some z are outside [0,1] */
};

/* Which keys are padded. Padded keys are NaN. */
enum {
    PAD_NONE,
    PAD_SCATTERED,
    PAD_BEFORE,    /* before the sequence */
    PAD_ROW_0,     /* all keys of batch row 0, every second key of the other rows */
    PAD_BUT_FEW,   /* all but a few keys */
    PAD_BLOCKS,    /* every second block of 64 keys, shifted by the index of the batch row */
    PAD_BOTH_ENDS, /* the first 3 and the last 2 keys */
    PAD_HOLE       /* keys from 1/4 to 3/4 of the sequence */
};

/* How the rows of q, k and v are stored. */
enum {
    ROWS_PACKED,
    ROWS_ODD,   /* odd strides and offsets */
    ROWS_SLICES /* slices of one row; offsets and strides are multiples of 8 */
};

typedef struct attn {
    size_t B, T, S, H, D, P, N; /* P = 0: no pe */
    int shared, u, vb;          /* shared: all heads share pe */
    int z;                      /* Z_NONE.. */
    int z_one, no_renorm;       /* z_one: one z for all heads; no_renorm: the mask is
                                   applied after normalisation */
    size_t span;                /* 0: all keys are seen */
    int dmin, not_causal;
    int loose; /* whether span may exceed the number of rows of pe; missing rows count as zero */
    ptrdiff_t first;
    /* The defaults, which 0 selects, are 1/sqrt(D), 150, 32, 0, 0 and 1. big: the
       magnitude of q and k */
    double scale, L, R, eps, drop, big;
    int gap;         /* one of ROWS_PACKED .. */
    int acts;        /* whether pe, u, vb, pk and pv are activations */
    size_t past;     /* number of keys that are stored in separate buffers; see >>cached rows */
    int sets, fresh; /* sets: number of head groups; fresh: whether gradients are overwritten */
    int pad;         /* PAD_NONE.. */
} attn;

enum { Q, KV, PE, U, VB, Z, PK, PV, DY, INS, GRADS = DY }; /* k and v in one buffer */

enum { OUT_Y, OUT_TOP, OUT_INV, OUT_GRADS, OUTS = OUT_GRADS + GRADS };

static const char *const out_name[OUTS] = {"y",  "top", "inv", "dq",  "dk, dv", "dpe",
                                           "du", "dvb", "dz",  "dpk", "dpv"};

static const char *position_of(const attn *c) {
    if (!c->P) return "";
    return c->shared ? " shared" : " per head";
}

static const char *label(const attn *c) {
    static char t[400];
    int n = snprintf(t, sizeof t, "B %zu T %zu S %zu H %zu D %zu P %zu%s%s%s z %d%s N %zu dmin %d",
                     c->B, c->T, c->S, c->H, c->D, c->P, position_of(c), c->u ? " u" : "",
                     c->vb ? " vb" : "", c->z, c->z_one ? " for all" : "", c->N, c->dmin);
    n += snprintf(t + n, sizeof t - (size_t)n, " span %zu eps %g%s first %ld%s%s scale %g", c->span,
                  c->eps, c->no_renorm ? " no renorm" : "", (long)c->first,
                  c->not_causal ? " not causal" : "", c->loose ? " loose" : "", c->scale);
    snprintf(t + n, sizeof t - (size_t)n, " L %g R %g drop %g big %g gap %d%s pad %d", c->L, c->R,
             c->drop, c->big, c->gap, c->acts ? " activations" : "", c->pad);
    return t;
}

/* The data of one case on the host: inputs, initial gradients, and the results of the
   CPU. */
typedef struct data {
    const attn *c;
    stx_attention_args a;               /* sizes and scalars; each run sets the pointers */
    size_t size[INS], qo, ko, vo, rows; /* qo, ko, vo: offsets of q, k, v in their
                                           buffers; rows = B H T */
    float *in[INS], *start[GRADS], *expected[OUTS];
    size_t out_size[OUTS];
    int32_t *pad; /* (B, S + 3), or NULL */
} data;

/* Returns the offset in KV of row j of the keys (v = 0) or of the values (v = 1) in
   batch row b. */
static size_t kv_at(const data *d, int v, size_t b, size_t j) {
    return (v ? d->vo : d->ko) + b * d->a.kv_batch_stride + j * d->a.kv_row_stride;
}

static size_t q_at(const data *d, size_t b, size_t i) {
    return d->qo + b * d->a.q_batch_stride + i * d->a.q_row_stride;
}

/* Sets all C elements of row j of k and of row j of v, in batch row b. */
static void set_row(float *kv, const data *d, size_t b, size_t j, float k, float v) {
    size_t e;
    for (e = 0; e < d->a.H * d->a.D; e++) {
        kv[kv_at(d, 0, b, j) + e] = k;
        kv[kv_at(d, 1, b, j) + e] = v;
    }
}

/* Nonzero if the tensor is stored like activations: in bf16, if the context uses bf16. */
static int is_stored(const attn *c, size_t i) {
    return i == Q || i == KV || i == DY || (c->acts && i != Z);
}

static const char *precision_name(int half) {
    return half ? "bf16" : "f32";
}

/* Sets the pointers in the args. A NULL entry in grad means that this gradient is not
   requested. */
static void point(data *d, stx_attention_args *a, stx_real *const *in, stx_real *const *grad,
                  stx_real *y, stx_real *top, stx_real *inv) {
    *a = d->a;
    a->y = y;
    a->row_max = top;
    a->inv_sum = inv;
    a->q = in[Q];
    a->k = in[KV];
    a->v = in[KV];
    a->dy = in[DY];
    a->pe = d->size[PE] ? in[PE] : NULL;
    a->content_bias = d->size[U] ? in[U] : NULL;
    a->position_bias = d->size[VB] ? in[VB] : NULL;
    a->span_fraction = d->size[Z] ? in[Z] : NULL;
    a->persistent_k = d->size[PK] ? in[PK] : NULL;
    a->persistent_v = d->size[PV] ? in[PV] : NULL;
    a->dq = grad[Q];
    a->dk = a->dv = grad[KV];
    a->dpe = a->pe ? grad[PE] : NULL;
    a->dcontent_bias = a->content_bias ? grad[U] : NULL;
    a->dposition_bias = a->position_bias ? grad[VB] : NULL;
    a->dspan_fraction = a->span_fraction ? grad[Z] : NULL;
    a->dpersistent_k = a->persistent_k ? grad[PK] : NULL;
    a->dpersistent_v = a->persistent_v ? grad[PV] : NULL;
}

/* Returns p advanced by n elements. On a GPU, an element of p may have only 2 bytes. */
static stx_real *skip(stx_ctx *x, const stx_real *p, size_t n) {
    size_t bytes = sizeof(stx_real);
    if (!p) return NULL;
    if (stx_ctx_desc(x)->device == STX_CUDA && stx_cuda_is_bf16(x, p)) bytes = 2;
    return (stx_real *)(void *)((char *)(uintptr_t)p + n * bytes);
}

static void offsets(data *d, stx_ctx *x, stx_attention_args *a) {
    a->q = skip(x, a->q, d->qo);
    a->k = skip(x, a->k, d->ko);
    a->v = skip(x, a->v, d->vo);
    a->dq = skip(x, a->dq, d->qo);
    a->dk = skip(x, a->dk, d->ko);
    a->dv = skip(x, a->dv, d->vo);
}

/* Fills in sizes and scalars, with defaults resolved as in stx_attention. */
static void args_open(data *d) {
    const attn *c = d->c;
    stx_attention_args *a = &d->a;
    a->B = c->B;
    a->T = c->T;
    a->S = c->S;
    a->H = c->H;
    a->D = c->D;
    a->P = c->P;
    a->N = c->N;
    a->pe_heads = c->shared ? 1 : (int)c->H;
    a->delta_min = c->dmin;
    a->not_causal = c->not_causal;
    a->no_renorm = c->no_renorm;
    a->span_shared = c->z_one;
    a->first_key = c->first < (ptrdiff_t)c->S ? c->first : (ptrdiff_t)c->S;
    a->span = c->S + (c->first < 0 ? (size_t)-c->first : 0);
    if (c->span && c->span < a->span) a->span = c->span;
    if (c->first < 0 && (size_t)-c->first > a->span) a->first_key = -(ptrdiff_t)a->span;
    if (c->P && !c->loose && a->span > c->P + (size_t)c->dmin - 1)
        a->span = c->P + (size_t)c->dmin - 1;
    a->scale = (stx_real)(c->scale != 0 ? c->scale : 1 / sqrt((double)c->D));
    a->max_span = (stx_real)(c->L > 0 ? c->L : 150);
    a->ramp = (stx_real)(c->R > 0 ? c->R : 32);
    a->eps = (stx_real)c->eps;
    a->drop = (stx_real)c->drop;
    a->seed = 0x1234567890abcdefu;
    a->stream = ((uint64_t)7 << 24) + 5;
}

/* Chooses the strides, offsets and sizes of the buffers. */
static void layout_open(data *d) {
    const attn *c = d->c;
    stx_attention_args *a = &d->a;
    const size_t C = c->H * c->D, gap = c->gap == ROWS_ODD ? 3 : 8;
    const int odd = c->gap == ROWS_ODD;
    if (c->gap == ROWS_PACKED) {
        a->q_row_stride = a->kv_row_stride = C;
        a->q_batch_stride = c->T * C;
        a->kv_batch_stride = c->S * C;
        d->vo = c->B * a->kv_batch_stride;
        d->size[Q] = c->B * a->q_batch_stride;
        d->size[KV] = 2 * c->B * a->kv_batch_stride;
    } else {
        a->q_row_stride = 3 * C + gap;
        a->q_batch_stride = (c->T + 1) * a->q_row_stride + gap - 3;
        a->kv_row_stride = 2 * C + 2 * gap + (odd ? 1 : 0);
        a->kv_batch_stride = (c->S + 2) * a->kv_row_stride + (odd ? 5 : 16);
        if (!odd) a->q_batch_stride = (a->q_batch_stride + 7) / 8 * 8;
        d->qo = gap;
        d->ko = 2 * gap;
        d->vo = d->ko + C + gap - (odd ? 1 : 0);
        d->size[Q] = d->qo + c->B * a->q_batch_stride;
        d->size[KV] = d->vo + c->B * a->kv_batch_stride + C;
    }
    d->size[DY] = c->B * c->T * C;
    d->size[PE] = c->P * (c->shared ? c->D : C);
    d->size[U] = c->u ? C : 0;
    d->size[VB] = c->vb && c->P ? C : 0;
    if (c->z) d->size[Z] = c->z_one ? 1 : c->H;
    d->size[PK] = d->size[PV] = c->N * C;
    d->rows = c->B * c->H * c->T;
    d->out_size[OUT_Y] = d->size[DY];
    d->out_size[OUT_TOP] = d->out_size[OUT_INV] = d->rows;
    memcpy(d->out_size + OUT_GRADS, d->size, GRADS * sizeof *d->size);
}

/* Nonzero if key j of batch row b is padded. */
static int is_padded(const attn *c, size_t b, size_t j) {
    switch (c->pad) {
    case PAD_SCATTERED: return test_rand() < -0.2;
    case PAD_BEFORE: return j < c->S * (b + 1) / 3;
    case PAD_ROW_0: return b == 0 || j % 2;
    case PAD_BUT_FEW: return j % 19 != b + 1;
    case PAD_BLOCKS: return (j / 64 + b) % 2 == 0;
    case PAD_BOTH_ENDS: return j < 3 || j + 2 >= c->S;
    default: return j >= c->S / 4 && j < c->S * 3 / 4;
    }
}

static void pad_open(data *d) {
    static const int32_t marks[] = {1, -1, 1 << 30, 2};
    const attn *c = d->c;
    size_t b, j;
    if (!c->pad) return;
    d->a.pad_batch_stride = c->S + 3;
    d->pad = (int32_t *)calloc(c->B * d->a.pad_batch_stride, sizeof *d->pad);
    for (b = 0; b < c->B; b++)
        for (j = 0; j < c->S; j++)
            if (is_padded(c, b, j)) d->pad[b * d->a.pad_batch_stride + j] = marks[j % 4];
}

/* Returns the span fraction z of head h. Only with Z_ENDS and Z_BEYOND may it be at a
   kink of the ramp function. */
static float z_of(const attn *c, size_t h) {
    static const float ends[] = {0, 1, 0.5f, 0.25f}, beyond[] = {-0.3f, 1.7f, 0.4f, -5};
    double L = c->L > 0 ? c->L : 150, f = 0.05 + 0.9 * (double)((h * 7 + 3) % 11) / 11;
    if (c->z == Z_ENDS) return ends[h % 4];
    if (c->z == Z_BEYOND) return beyond[h % 4];
    if (c->z == Z_SHORT) f = 0.03 * (double)(h % 3);
    if (c->z == Z_ONE_LONG) f = h == c->H / 2 ? 0.97 : 0.01;
    return (float)((floor(f * L) + 0.37) / L);
}

/* Creates the arrays of a case. half: rounds the inputs to values that bf16 can
   represent. add: gives the gradients nonzero initial values. */
static void data_open(data *d, const attn *c, int half, int add) {
    size_t i, h, b;
    memset(d, 0, sizeof *d);
    d->c = c;
    args_open(d);
    pad_open(d);
    layout_open(d);
    for (i = 0; i < INS; i++) {
        double s = (i == Q || i == KV) && c->big > 0 ? c->big : 1;
        d->in[i] = cuda_random(d->size[i], s, 0);
        /* Parameters are also rounded, so that the bf16 copies of parameters are
           exact. */
        if (half && i != Z) cuda_round(d->in[i], d->size[i]);
    }
    for (b = 0; d->pad && b < c->B; b++)
        for (h = 0; h < c->S; h++)
            if (d->pad[b * d->a.pad_batch_stride + h])
                set_row(d->in[KV], d, b, h, (float)NAN, (float)NAN);
    for (h = 0; h < d->size[Z]; h++) d->in[Z][h] = z_of(c, h);
    for (i = 0; i < GRADS; i++) {
        d->start[i] = cuda_random(d->size[i], 1, 0);
        if (!add) memset(d->start[i], 0, d->size[i] * sizeof(float));
        if (half && is_stored(c, i)) cuda_round(d->start[i], d->size[i]);
    }
    for (i = 0; i < OUTS; i++) d->expected[i] = (float *)calloc(d->out_size[i] + 1, sizeof(float));
}

static void data_close(data *d) {
    size_t i;
    free(d->pad);
    for (i = 0; i < INS; i++) free(d->in[i]);
    for (i = 0; i < GRADS; i++) free(d->start[i]);
    for (i = 0; i < OUTS; i++) free(d->expected[i]);
}

static float **outputs(const data *d) {
    float **o = (float **)calloc(OUTS, sizeof *o);
    size_t i;
    for (i = 0; i < OUTS; i++) o[i] = (float *)calloc(d->out_size[i] + 1, sizeof **o);
    return o;
}

static void outputs_free(float **o) {
    size_t i;
    for (i = 0; i < OUTS; i++) free(o[i]);
    free(o);
}

/* Runs one pass and allocates its scratch for the duration of the call. */
static void run_pass(stx_ctx *x, stx_attention_args *a, int backward) {
    a->work = NULL;
    if (stx_ctx_desc(x)->device == STX_CUDA) {
        a->work = cuda_bytes(x, NULL, stx_attention_work_cuda(x, a, backward));
        (backward ? stx_attention_bwd_cuda : stx_attention_fwd_cuda)(x, a);
        stx_cuda_free(x, a->work);
    } else {
        a->work = malloc(stx_attention_work(x, a, backward) + 1);
        (backward ? stx_attention_bwd : stx_attention_fwd)(x, a);
        free(a->work);
    }
    a->work = NULL;
}

static void on_cpu(stx_ctx *x, data *d) {
    stx_attention_args a;
    stx_real *grad[GRADS];
    size_t i;
    for (i = 0; i < GRADS; i++) {
        grad[i] = d->expected[OUT_GRADS + i];
        memcpy(grad[i], d->start[i], d->size[i] * sizeof(float));
    }
    point(d, &a, d->in, grad, d->expected[OUT_Y], d->expected[OUT_TOP], d->expected[OUT_INV]);
    offsets(d, x, &a);
    a.pad = d->pad;
    run_pass(x, &a, 0);
    run_pass(x, &a, 1);
    CHECK(stx_ok(x), "%s: %s", label(d->c), stx_error(x));
}

enum { FORWARD_ONLY = 1 << 16 };

/* Runs a case on the GPU. without: bit mask of the gradients that are not requested.
   Bit GRADS omits dv but not dk; FORWARD_ONLY skips the backward pass. */
static void on_gpu(stx_ctx *x, data *d, int version, int without, float **out) {
    stx_attention_args a;
    stx_real *in[INS], *grad[GRADS], *y, *top, *inv;
    void *pad = NULL;
    size_t i;
    stx_cuda_attention(x, version);
    for (i = 0; i < INS; i++)
        in[i] = cuda_array(x, d->in[i], d->size[i],
                             is_stored(d->c, i) ? STX_MEM_ACTIVATIONS : STX_MEM_PARAMS);
    for (i = 0; i < GRADS; i++) {
        int kind = is_stored(d->c, i) ? STX_MEM_ACTIVATIONS : STX_MEM_BYTES;
        grad[i] = without & 1 << i ? NULL : cuda_array(x, d->start[i], d->size[i], kind);
    }
    y = cuda_array(x, NULL, d->size[DY], STX_MEM_ACTIVATIONS);
    top = cuda_array(x, NULL, d->rows, STX_MEM_BYTES);
    inv = cuda_array(x, NULL, d->rows, STX_MEM_BYTES);
    point(d, &a, in, grad, y, top, inv);
    offsets(d, x, &a);
    if (without & 1 << GRADS) a.dv = NULL;
    if (d->pad) pad = cuda_bytes(x, d->pad, a.B * a.pad_batch_stride * sizeof *d->pad);
    a.pad = (const int32_t *)pad;
    run_pass(x, &a, 0);
    if (!(without & FORWARD_ONLY)) run_pass(x, &a, 1);
    CHECK(stx_ok(x), "version %d: %s: %s", version, label(d->c), stx_error(x));
    stx_cuda_download_activations(x, out[OUT_Y], y, d->size[DY]);
    stx_cuda_download_activations(x, out[OUT_TOP], top, d->rows);
    stx_cuda_download_activations(x, out[OUT_INV], inv, d->rows);
    for (i = 0; i < GRADS; i++) {
        if (grad[i] && d->size[i])
            stx_cuda_download_activations(x, out[OUT_GRADS + i], grad[i], d->size[i]);
        stx_cuda_free(x, grad[i]);
    }
    for (i = 0; i < INS; i++) stx_cuda_free(x, in[i]);
    stx_cuda_free(x, y);
    stx_cuda_free(x, top);
    stx_cuda_free(x, inv);
    stx_cuda_free(x, pad);
}


// >>comparison
/* Error limits, relative to the largest element of a tensor or to a floor, whichever is
   larger. The floor is needed because cancellation may leave a small gradient (0 in a row
   of one key) although its terms are of order 1.

   FLOAT: in f32, up to a few hundred terms are added in different orders. Each is less
   than e^s and rounded by 6e-8. A logit of size s is rounded by 6e-8 s, which changes its
   weight by the same relative amount; cases with logits of 3000 have a limit of 1e-3.

   HALF: in bf16, y and the activation gradients are stored with 8 binary digits (2e-3 of
   an element). The fused kernels also round q + u, weights and ds to 8 digits. This
   changes a logit of size 4 by 1e-2 and its weight by the same relative amount.

   HALF_SUMS: dz and the table gradients are sums of terms of both signs. The terms partly
   cancel, but their errors do not.

   With large logits, 8 digits leave nothing to compare. Version 0 then computes in f32,
   and the fused kernels must only return finite values of the right magnitude. */
static const double FLOAT = 1e-5, HALF = 1.5e-2, HALF_SUMS = 4e-2;
static double worst[2][OUTS];

static int in_rows(size_t i, size_t offset, size_t batch_stride, size_t row_stride, size_t batch,
                   size_t rows, size_t width) {
    return i >= offset && (i - offset) / batch_stride < batch
           && (i - offset) % batch_stride / row_stride < rows
           && (i - offset) % batch_stride % row_stride < width;
}

/* Nonzero if element i belongs to a row. Elements between rows must not be written. */
static int owned(const data *d, size_t out, size_t i) {
    const stx_attention_args *a = &d->a;
    size_t C = a->H * a->D;
    if (d->c->gap == ROWS_PACKED) return 1;
    if (out == OUT_GRADS + Q)
        return in_rows(i, d->qo, a->q_batch_stride, a->q_row_stride, a->B, a->T, C);
    if (out != OUT_GRADS + KV) return 1;
    return in_rows(i, d->ko, a->kv_batch_stride, a->kv_row_stride, a->B, a->S, C)
           || in_rows(i, d->vo, a->kv_batch_stride, a->kv_row_stride, a->B, a->S, C);
}

/* Returns the largest |a| among values up to 1e30, or top if that is larger.
   Infinities, which occur in rows that see no key, are skipped. */
static double largest(const float *a, size_t n, double top) {
    size_t i;
    for (i = 0; i < n; i++)
        if (fabs((double)a[i]) <= 1e30) top = STX_MAX(top, fabs((double)a[i]));
    return top;
}

static int is_fused(int version) {
    return version != 1 && version != 3;
}

static double tolerance(size_t o, double logit, int half, int version) {
    if (!half) return FLOAT + 4e-7 * logit;
    if (is_fused(version) && logit > 100) return 3;
    return o >= OUT_GRADS + PE ? HALF_SUMS : HALF;
}

/* Returns the error of inv. A row that sees no key must have inv = 0. For other rows,
   the logarithm of the normaliser, e^top / inv, is compared. */
static double inv_error(const data *d, float **got, int *exact) {
    double off = 0;
    size_t i;
    for (i = 0; i < d->rows; i++) {
        double g = (double)got[OUT_INV][i], w = (double)d->expected[OUT_INV][i];
        double top = (double)got[OUT_TOP][i], row_max = (double)d->expected[OUT_TOP][i];
        if (g == 0 || w == 0)
            *exact &= g == w;
        else
            raise_worst(&off, fabs(top - log(g) - (row_max - log(w))) / STX_MAX(1, fabs(row_max)));
    }
    return off;
}

/* Returns the error of output o, relative to its largest element or to the floor. Sets
   *exact to 0 if an element between rows was written. */
static double output_error(const data *d, float **got, size_t o, double floor_, int *exact) {
    const float *expected = d->expected[o];
    double top = largest(expected, d->out_size[o], floor_), off = 0;
    size_t i;
    for (i = 0; i < d->out_size[o]; i++) {
        double g = (double)got[o][i], w = (double)expected[i];
        if (o >= OUT_GRADS && !owned(d, o, i)) {
            if (memcmp(&got[o][i], &d->start[o - OUT_GRADS][i], sizeof(float))) *exact = 0;
        } else if (g != w) /* equal infinities are allowed: row_max of a row that sees no key */
            raise_worst(&off, fabs(g - w));
    }
    return off > 0 && top > 0 ? off / top : off;
}

/* Nonzero if the gradients of padded keys are unchanged. */
static int padded_kept(const data *d, const float *dkv) {
    size_t b, j, e;
    for (b = 0; b < d->a.B; b++)
        for (j = 0; j < d->a.S; j++) {
            size_t k = kv_at(d, 0, b, j), v = kv_at(d, 1, b, j);
            if (!d->pad[b * d->a.pad_batch_stride + j]) continue;
            for (e = 0; e < d->a.H * d->a.D; e++)
                if (dkv[k + e] != d->start[KV][k + e] || dkv[v + e] != d->start[KV][v + e])
                    return 0;
        }
    return 1;
}

static void compare(const data *d, float **got, int half, int version, int forward_only) {
    const double logit = largest(d->expected[OUT_TOP], d->rows, 0);
    size_t o;
    for (o = 0; o < (size_t)(forward_only ? OUT_GRADS : OUTS); o++) {
        double floor_ = 0, off;
        int exact = 1;
        if (o >= OUT_GRADS) floor_ = half ? 0.5 : 0.1;
        if (o == OUT_GRADS + Z)
            floor_ *= STX_MAX(1, (double)d->a.max_span / (double)d->a.ramp);
        off = o == OUT_INV ? inv_error(d, got, &exact) : output_error(d, got, o, floor_, &exact);
        if (off > worst[half][o]) worst[half][o] = off;
        CHECK(off <= tolerance(o, logit, half, version), "%s of version %d, %s: error %.2e: %s",
              out_name[o], version, precision_name(half), off, label(d->c));
        if (d->pad && o == OUT_GRADS + KV) exact &= padded_kept(d, got[o]);
        CHECK(exact,
              "%s of version %d, %s: wrong in a row that sees nothing, or written between rows or "
              "at a padded key: %s",
              out_name[o], version, precision_name(half), label(d->c));
    }
}

static stx_ctx *cpu, *gpu[2]; /* float, bf16 */
/* kernel versions (see stx_cuda_attention); versions 4 to 6 differ from version 2 only
   in bf16 */
static const int versions[] = {1, 3, 2, 4, 5, 6};

static size_t versions_of(int half) {
    return half ? 6 : 3;
}

/* Tests one case. which: bit mask of the elements of `versions` to run. */
static void one_case(const attn *c, int half, int add, unsigned which) {
    data d;
    float **got;
    size_t v;
    data_open(&d, c, half, add);
    got = outputs(&d);
    on_cpu(cpu, &d);
    for (v = 0; v < versions_of(half); v++) {
        if (!(which >> v & 1)) continue;
        on_gpu(gpu[half], &d, versions[v], 0, got);
        compare(&d, got, half, versions[v], 0);
    }
    outputs_free(got);
    data_close(&d);
}

/* In this table, 1 means Z_MIXED for z, ROWS_ODD for gap and PAD_SCATTERED for pad. */
static const attn table[] = {
    /* sizes */
    {.B = 1, .T = 1, .S = 1, .H = 1, .D = 1},
    {.B = 2, .T = 2, .S = 3, .H = 2, .D = 2, .dmin = 1},
    {.B = 1, .T = 3, .S = 5, .H = 3, .D = 3, .P = 5},
    {.B = 2, .T = 5, .S = 7, .H = 1, .D = 5, .P = 7, .dmin = 1},
    {.B = 1, .T = 7, .S = 7, .H = 2, .D = 7, .P = 6, .dmin = 1, .u = 1, .vb = 1},
    {.B = 1, .T = 16, .S = 33, .H = 2, .D = 16, .P = 33, .shared = 1},
    {.B = 2, .T = 17, .S = 64, .H = 1, .D = 17, .P = 64, .shared = 1, .u = 1},
    {.B = 1, .T = 31, .S = 65, .H = 1, .D = 31, .P = 65, .vb = 1},
    {.B = 1, .T = 33, .S = 33, .H = 1, .D = 33, .P = 33},
    {.B = 1, .T = 64, .S = 128, .H = 1, .D = 64, .P = 128, .dmin = 1},
    {.B = 1, .T = 65, .S = 130, .H = 1, .D = 65, .P = 130, .dmin = 1},
    {.B = 1, .T = 96, .S = 96, .H = 1, .D = 96, .P = 96},
    {.B = 1, .T = 128, .S = 130, .H = 1, .D = 128},
    {.B = 1, .T = 130, .S = 131, .H = 1, .D = 130, .P = 131},
    {.B = 1, .T = 5, .S = 9, .H = 1, .D = 200, .P = 9, .N = 3, .drop = 0.2},
    {.B = 5, .T = 3, .S = 4, .H = 3, .D = 8, .P = 4, .N = 2, .u = 1, .vb = 1, .z = 1, .L = 4,
     .R = 2, .shared = 1},
    /* learned spans */
    {.B = 2, .T = 40, .S = 160, .H = 4, .D = 16, .P = 160, .shared = 1, .dmin = 1, .z = 1},
    {.B = 1, .T = 64, .S = 192, .H = 3, .D = 32, .P = 192, .shared = 1, .dmin = 1, .z = 2},
    {.B = 1, .T = 65, .S = 200, .H = 4, .D = 8, .P = 150, .shared = 1, .dmin = 1, .z = 3},
    {.B = 1, .T = 33, .S = 190, .H = 4, .D = 16, .P = 190, .dmin = 0, .z = 4, .L = 128},
    {.B = 1, .T = 33, .S = 190, .H = 4, .D = 16, .P = 190, .dmin = 1, .z = 5, .L = 128, .R = 20},
    {.B = 2, .T = 17, .S = 100, .H = 4, .D = 16, .z = 4, .L = 64, .R = 1},
    {.B = 1, .T = 40, .S = 160, .H = 2, .D = 16, .P = 160, .shared = 1, .dmin = 1, .z = 1,
     .eps = 1e-8},
    {.B = 2, .T = 24, .S = 90, .H = 3, .D = 8, .P = 90, .z = 2, .eps = 0.01, .L = 60, .u = 1,
     .vb = 1},
    {.B = 1, .T = 33, .S = 70, .H = 4, .D = 16, .P = 60, .dmin = 1, .z = 5, .eps = 0.001, .L = 40,
     .R = 7, .N = 5},
    {.B = 1, .T = 20, .S = 70, .H = 1, .D = 16, .eps = 0.25},
    /* windows */
    {.B = 1, .T = 70, .S = 140, .H = 2, .D = 16, .span = 20},
    {.B = 1, .T = 70, .S = 140, .H = 2, .D = 16, .span = 1, .dmin = 1, .P = 30},
    {.B = 1, .T = 70, .S = 140, .H = 1, .D = 16, .P = 17, .loose = 1, .u = 1, .vb = 1},
    {.B = 2, .T = 33, .S = 65, .H = 2, .D = 16, .P = 17, .shared = 1, .dmin = 1, .loose = 1, .z = 1,
     .L = 60},
    {.B = 1, .T = 20, .S = 40, .H = 2, .D = 16, .P = 300, .shared = 1, .dmin = 1, .span = 30},
    {.B = 1, .T = 3, .S = 50, .H = 2, .D = 16, .P = 1},
    /* keys before first_key; zero keys */
    {.B = 2, .T = 40, .S = 80, .H = 2, .D = 16, .P = 80, .first = 37},
    {.B = 1, .T = 40, .S = 40, .H = 2, .D = 16, .P = 40, .first = 13, .u = 1},
    {.B = 1, .T = 20, .S = 20, .H = 2, .D = 16, .first = 20},
    {.B = 1, .T = 20, .S = 20, .H = 2, .D = 16, .first = 20, .N = 3},
    {.B = 2, .T = 40, .S = 70, .H = 2, .D = 16, .P = 200, .shared = 1, .first = -90, .dmin = 1},
    {.B = 1, .T = 33, .S = 33, .H = 3, .D = 16, .P = 70, .first = -200, .u = 1, .vb = 1,
     .drop = 0.1},
    {.B = 1, .T = 33, .S = 33, .H = 3, .D = 16, .P = 90, .first = -64, .z = 1, .L = 80, .N = 2,
     .dmin = 1},
    {.B = 1, .T = 33, .S = 33, .H = 3, .D = 16, .first = -5, .eps = 1e-3, .z = 1, .L = 30, .R = 8},
    {.B = 2, .T = 1, .S = 1, .H = 1, .D = 4, .dmin = 1},
    {.B = 1, .T = 30, .S = 30, .H = 2, .D = 16, .dmin = 1, .P = 30},
    /* not causal */
    {.B = 2, .T = 33, .S = 20, .H = 2, .D = 16, .not_causal = 1},
    {.B = 1, .T = 20, .S = 70, .H = 2, .D = 16, .not_causal = 1, .first = 9, .u = 1, .drop = 0.4},
    {.B = 1, .T = 65, .S = 65, .H = 1, .D = 32, .not_causal = 1, .N = 4},
    /* persistent vectors */
    {.B = 2, .T = 16, .S = 32, .H = 2, .D = 16, .N = 1, .P = 32, .shared = 1},
    {.B = 1, .T = 33, .S = 64, .H = 2, .D = 16, .N = 5, .P = 64, .u = 1, .vb = 1},
    {.B = 1, .T = 33, .S = 64, .H = 2, .D = 32, .N = 64, .z = 1, .L = 50},
    {.B = 2, .T = 40, .S = 40, .H = 2, .D = 16, .N = 70, .dmin = 1, .drop = 0.3},
    /* dropout, strides, activations, logits of different sizes */
    {.B = 2, .T = 33, .S = 70, .H = 2, .D = 16, .P = 70, .shared = 1, .drop = 0.5},
    {.B = 1, .T = 65, .S = 130, .H = 3, .D = 16, .P = 130, .dmin = 1, .z = 1, .L = 100, .drop = 0.2,
     .N = 3},
    {.B = 2, .T = 17, .S = 40, .H = 2, .D = 16, .P = 40, .gap = 1, .u = 1},
    {.B = 2, .T = 33, .S = 65, .H = 2, .D = 32, .P = 65, .gap = 2, .shared = 1, .dmin = 1, .z = 1,
     .L = 60},
    {.B = 2, .T = 20, .S = 20, .H = 3, .D = 5, .gap = 1, .N = 4, .first = -9, .drop = 0.3},
    {.B = 3, .T = 64, .S = 64, .H = 1, .D = 64, .gap = 2, .P = 64},
    {.B = 2, .T = 33, .S = 65, .H = 2, .D = 16, .P = 65, .acts = 1, .u = 1, .vb = 1, .N = 6},
    {.B = 1, .T = 33, .S = 65, .H = 4, .D = 8, .P = 65, .shared = 1, .acts = 1, .gap = 2, .z = 1,
     .L = 50},
    {.B = 1, .T = 33, .S = 65, .H = 2, .D = 16, .P = 65, .big = 30, .scale = 1},
    {.B = 1, .T = 33, .S = 65, .H = 2, .D = 16, .P = 65, .big = 40, .scale = 1, .z = 1, .L = 50,
     .N = 2},
    {.B = 1, .T = 20, .S = 65, .H = 2, .D = 16, .P = 65, .scale = -0.3, .u = 1},
    /* padded keys */
    {.B = 2, .T = 5, .S = 9, .H = 2, .D = 8, .pad = 1},
    {.B = 3, .T = 20, .S = 33, .H = 2, .D = 16, .P = 33, .dmin = 1, .u = 1, .vb = 1, .pad = 1},
    {.B = 3, .T = 33, .S = 33, .H = 2, .D = 16, .pad = 2},
    {.B = 2, .T = 17, .S = 40, .H = 3, .D = 8, .P = 40, .shared = 1, .z = 1, .L = 30, .R = 8,
     .N = 3, .pad = 3},
    {.B = 2, .T = 17, .S = 40, .H = 2, .D = 8, .pad = 3, .gap = 1},
    {.B = 2, .T = 33, .S = 100, .H = 2, .D = 16, .z = 2, .L = 60, .R = 8, .eps = 0.01, .pad = 4},
    {.B = 2, .T = 33, .S = 70, .H = 2, .D = 16, .P = 120, .first = -40, .dmin = 1, .pad = 1,
     .drop = 0.3},
    {.B = 2, .T = 20, .S = 30, .H = 2, .D = 16, .not_causal = 1, .pad = 4, .gap = 2},
    {.B = 3, .T = 20, .S = 12, .H = 1, .D = 16, .not_causal = 1, .pad = 3, .N = 2, .first = 3},
    {.B = 2, .T = 1, .S = 30, .H = 2, .D = 8, .P = 30, .span = 11, .pad = 4},
    {.B = 1, .T = 65, .S = 70, .H = 2, .D = 16, .P = 20, .loose = 1, .pad = 1, .acts = 1, .u = 1},
    /* head sizes of 65 to 96 and of 97 to 128 channels, which have separate bf16
       kernels */
    {.B = 2, .T = 70, .S = 170, .H = 2, .D = 96, .P = 150, .shared = 1, .dmin = 1, .z = 3,
     .L = 140},
    {.B = 1, .T = 65, .S = 140, .H = 2, .D = 88, .P = 140, .u = 1, .vb = 1, .z = 1, .L = 60, .N = 5,
     .drop = 0.2},
    {.B = 1, .T = 40, .S = 100, .H = 3, .D = 96, .not_causal = 1, .pad = 1, .N = 33, .gap = 2},
    {.B = 2, .T = 33, .S = 120, .H = 1, .D = 80, .P = 120, .vb = 1, .pad = 7, .acts = 1},
    {.B = 1, .T = 70, .S = 130, .H = 2, .D = 104, .P = 130, .dmin = 1, .z = 1, .L = 90, .u = 1},
    /* heads as wide as a model */
    {.B = 1, .T = 5, .S = 9, .H = 1, .D = 744, .P = 9, .N = 2, .drop = 0.2, .big = 0.3},
    {.B = 2, .T = 3, .S = 7, .H = 1, .D = 1024, .pad = 1},
    {.B = 1, .T = 17, .S = 33, .H = 1, .D = 1024, .z = 1, .L = 30, .R = 8, .u = 1, .dmin = 1,
     .P = 33, .vb = 1},
    {.B = 1, .T = 20, .S = 20, .H = 1, .D = 744, .not_causal = 1, .pad = 2, .gap = 1},
    /* longer sequences */
    {.B = 1, .T = 129, .S = 400, .H = 2, .D = 64, .P = 300, .shared = 1, .dmin = 1, .z = 3,
     .L = 290},
    /* mask after normalisation; one span for all heads; fractional ramps */
    {.B = 2, .T = 33, .S = 190, .H = 4, .D = 16, .P = 190, .shared = 1, .dmin = 1, .z = 1, .L = 128,
     .R = 8, .no_renorm = 1},
    {.B = 1, .T = 70, .S = 300, .H = 2, .D = 64, .P = 300, .shared = 1, .dmin = 1, .z = 3, .L = 290,
     .no_renorm = 1, .drop = 0.2},
    {.B = 2, .T = 33, .S = 100, .H = 3, .D = 16, .P = 90, .dmin = 1, .z = 4, .L = 64, .R = 12,
     .no_renorm = 1, .N = 5, .u = 1, .vb = 1},
    {.B = 2, .T = 33, .S = 100, .H = 4, .D = 16, .P = 90, .z = 5, .L = 64, .R = 7, .no_renorm = 1,
     .first = -30},
    {.B = 1, .T = 33, .S = 100, .H = 2, .D = 16, .P = 100, .dmin = 1, .z = 2, .L = 60, .R = 8,
     .no_renorm = 1, .pad = 1},
    {.B = 2, .T = 40, .S = 90, .H = 3, .D = 16, .P = 90, .dmin = 1, .z = 1, .z_one = 1, .L = 64,
     .R = 8},
    {.B = 2, .T = 40, .S = 90, .H = 3, .D = 16, .P = 90, .dmin = 1, .z = 4, .z_one = 1, .L = 64,
     .R = 2.5, .no_renorm = 1, .first = -9, .N = 2},
    {.B = 3, .T = 65, .S = 130, .H = 2, .D = 32, .P = 130, .shared = 1, .dmin = 1, .z = 2,
     .z_one = 1, .L = 100, .R = 30.5, .no_renorm = 1},
    {.B = 1, .T = 33, .S = 70, .H = 4, .D = 16, .P = 70, .dmin = 1, .z = 1, .L = 66, .R = 1.5},
    {.B = 2, .T = 33, .S = 90, .H = 3, .D = 7, .z = 4, .L = 64, .R = 2.7},
    {.B = 1, .T = 33, .S = 100, .H = 2, .D = 16, .P = 100, .dmin = 1, .z = 1, .L = 90, .R = 8,
     .no_renorm = 1, .big = 40},
    {.B = 1, .T = 140, .S = 300, .H = 2, .D = 64, .P = 300, .u = 1, .vb = 1, .drop = 0.1},
    /* padded keys in the fused kernels: whole tiles, holes, keys at both ends */
    {.B = 2, .T = 70, .S = 333, .H = 2, .D = 64, .P = 333, .shared = 1, .dmin = 1, .pad = 5,
     .drop = 0.2},
    {.B = 1, .T = 130, .S = 421, .H = 1, .D = 32, .P = 421, .u = 1, .vb = 1, .z = 1, .L = 400,
     .pad = 7, .N = 3},
    {.B = 2, .T = 65, .S = 131, .H = 1, .D = 128, .P = 131, .pad = 6, .dmin = 1, .vb = 1},
    {.B = 2, .T = 130, .S = 600, .H = 1, .D = 8, .P = 600, .span = 250, .pad = 7, .first = 77},
    {.B = 2, .T = 40, .S = 40, .H = 2, .D = 16, .dmin = 1, .pad = 6},
    {.B = 3, .T = 33, .S = 97, .H = 2, .D = 64, .pad = 2, .gap = 2, .z = 4, .L = 64, .R = 20,
     .drop = 0.3},
    {.B = 2, .T = 20, .S = 200, .H = 1, .D = 72, .pad = 4, .P = 200, .u = 1, .N = 9, .acts = 1},
    /* not causal: fewer or more keys than queries; a hole; a last key that is inside a
       tile */
    {.B = 2, .T = 150, .S = 37, .H = 2, .D = 64, .not_causal = 1},
    {.B = 2, .T = 64, .S = 256, .H = 1, .D = 128, .not_causal = 1, .drop = 0.2},
    {.B = 1, .T = 200, .S = 1, .H = 2, .D = 32, .not_causal = 1},
    {.B = 1, .T = 1, .S = 129, .H = 2, .D = 16, .not_causal = 1, .first = 100},
    {.B = 2, .T = 33, .S = 300, .H = 2, .D = 64, .not_causal = 1, .pad = 7, .N = 5, .drop = 0.3,
     .u = 1},
    {.B = 3, .T = 70, .S = 131, .H = 1, .D = 64, .not_causal = 1, .pad = 5, .gap = 2},
    {.B = 2, .T = 129, .S = 65, .H = 1, .D = 24, .not_causal = 1, .pad = 3, .N = 3},
    {.B = 2, .T = 90, .S = 65, .H = 1, .D = 8, .not_causal = 1, .pad = 6, .first = 64},
};

enum { TABLE = sizeof table / sizeof *table };

static size_t pick(size_t n) {
    return (size_t)((test_rand() + 1) * 0.5 * (double)n) % n;
}

static attn random_case(void) {
    static const size_t Ts[] = {1, 2, 3, 5, 16, 17, 31, 33, 48, 63, 64, 65, 70},
                        more[] = {0, 0, 1, 15, 31, 33, 64, 100},
                        Ds[] = {1, 3, 8, 8, 13, 16, 16, 24, 32, 33, 64}, Ns[] = {0, 0, 0, 1, 5, 20};
    static const double ramps[] = {1, 8, 32, 70, 1.5, 9.3}, epss[] = {0, 0, 0, 1e-3, 1e-8},
                        spans[] = {20, 77, 150};
    static const ptrdiff_t firsts[] = {0, 0, 0, -1, -40, -100, 3, 37};
    attn c;
    memset(&c, 0, sizeof c);
    do {
        c.T = Ts[pick(13)];
        c.S = c.T + more[pick(8)];
        c.D = Ds[pick(11)];
        c.B = 1 + pick(3);
        c.H = 1 + pick(4);
    } while (c.B * c.H * c.T * c.S * (c.D + 20) > 600000);
    c.N = Ns[pick(6)];
    c.u = pick(3) == 0;
    c.scale = pick(4) ? 0 : 0.21;
    c.drop = pick(3) ? 0 : 0.3;
    c.gap = (int)pick(3);
    c.acts = pick(4) == 0;
    if (pick(8) == 0) {
        c.not_causal = 1;
        if (pick(2)) c.first = (ptrdiff_t)pick(c.S);
        return c;
    }
    c.z = (int)pick(6);
    c.L = spans[pick(3)];
    c.R = ramps[pick(6)];
    c.dmin = (int)pick(2);
    c.eps = epss[pick(5)];
    c.no_renorm = pick(4) == 0 && c.z;
    c.z_one = pick(4) == 0 && c.z;
    if (c.no_renorm) c.eps = 0;
    c.span = pick(3) ? 0 : 1 + pick(100);
    c.first = firsts[pick(8)];
    if (pick(3)) {
        c.P = pick(2) ? 1 + pick(120) : c.S + 50;
        c.shared = (int)pick(2);
        c.loose = pick(4) == 0;
        c.vb = pick(3) == 0;
    }
    return c;
}


// >>cached rows
/* The keys and values before the current block are in separate buffers, one per head
   group. Each buffer holds only the rows that the group's heads see. Gradients are
   overwritten. The reference is the CPU with all keys in one common buffer. On the GPU,
   the cached rows of the common buffer are NaN, because they must not be read there.
   Gradients that will be overwritten are NaN as well. */
enum { CACHES = 3 };

/* Fill values. GAP fills the gaps between the rows of a group. UNUSED fills the
   gradients of cached keys in the common buffer. */
static const float GAP = 77, UNUSED = 55;

typedef struct cache {
    size_t count, rows[CACHES], heads[CACHES], ld[CACHES], st[CACHES], n[CACHES];
    uint8_t group[256], index[256];    /* the group of each head, and the head's index in
                                          the group */
    float *v[CACHES], *g[CACHES];      /* v: keys and values; g: initial gradients */
    stx_real *dv[CACHES], *dg[CACHES]; /* copies of v and g in the context */
} cache;

static stx_real *up(stx_ctx *x, const float *v, size_t n, int kind) {
    stx_real *p;
    if (stx_ctx_desc(x)->device == STX_CUDA) return cuda_array(x, v, n, kind);
    p = (stx_real *)malloc((n + 1) * sizeof *p);
    if (v) memcpy(p, v, n * sizeof *p);
    return p;
}

/* Copies array p of the context to v, unless v is NULL, and frees p. */
static void down(stx_ctx *x, float *v, stx_real *p, size_t n) {
    if (stx_ctx_desc(x)->device == STX_CUDA) {
        if (v) stx_cuda_download_activations(x, v, p, n);
        stx_cuda_free(x, p);
        return;
    }
    if (v) memcpy(v, p, n * sizeof *v);
    free(p);
}

/* Returns the number of cached rows that head h needs: all of them or, with several
   groups, only those that it sees. */
static size_t rows_needed(const data *d, size_t h) {
    const stx_attention_args *a = &d->a;
    size_t reach;
    if (d->c->sets < 2) return d->c->past;
    reach = stx_attention_reach((double)d->in[Z][h], (double)a->max_span, (double)a->ramp, a->span);
    return reach + 1 < d->c->past ? reach + 1 : d->c->past;
}

/* Returns the group of a head that needs `need` rows. The index also counts empty
   groups. */
static size_t group_of(const data *d, size_t need) {
    size_t past = d->c->past;
    if (d->c->sets < 3) return d->c->sets == 2 && need * 2 <= past;
    if (need * 3 > past * 2) return 0;
    return need * 3 > past ? 1 : 2;
}

static void groups_open(const data *d, cache *s) {
    size_t need[256], group[256], heads[CACHES] = {0, 0, 0}, index[CACHES] = {0, 0, 0}, h, g;
    for (h = 0; h < d->a.H; h++) {
        need[h] = rows_needed(d, h);
        group[h] = group_of(d, need[h]);
        heads[group[h]]++;
    }
    for (g = 0; g < CACHES; g++)
        if (heads[g]) index[g] = s->count++;
    for (h = 0; h < d->a.H; h++) {
        g = index[group[h]];
        s->group[h] = (uint8_t)g;
        s->index[h] = (uint8_t)s->heads[g]++;
        if (need[h] > s->rows[g]) s->rows[g] = need[h];
    }
}

/* Returns the offset of a cached key (v = 0) or value (v = 1) in the buffer of head h's
   group. The row is `back` rows before the block. */
static size_t cache_at(const cache *s, const data *d, size_t v, size_t b, size_t back, size_t h) {
    const size_t g = s->group[h], first = v * s->heads[g];
    return b * s->st[g] + (s->rows[g] - back) * s->ld[g] + (first + s->index[h]) * d->a.D;
}

static void cache_open(const data *d, cache *s) {
    const stx_attention_args *a = &d->a;
    const size_t past = d->c->past, D = a->D;
    const int odd = d->c->gap == ROWS_ODD;
    size_t h, g, b, j, e, v;
    memset(s, 0, sizeof *s);
    groups_open(d, s);
    for (g = 0; g < s->count; g++) {
        s->ld[g] = 2 * s->heads[g] * D + (odd ? 3 : 8);
        s->st[g] = s->rows[g] * s->ld[g] + (odd ? 5 : 16);
        s->n[g] = a->B * s->st[g];
        s->v[g] = (float *)malloc(s->n[g] * sizeof(float));
        s->g[g] = (float *)malloc(s->n[g] * sizeof(float));
        for (e = 0; e < s->n[g]; e++) {
            s->v[g][e] = (float)NAN;
            s->g[g][e] = GAP;
        }
    }
    for (b = 0; b < a->B; b++)
        for (j = 0; j < past; j++)
            for (h = 0; h < a->H; h++) {
                g = s->group[h];
                if (past - j > s->rows[g]) continue;
                for (v = 0; v < 2; v++) {
                    size_t to = cache_at(s, d, v, b, past - j, h);
                    size_t from = kv_at(d, (int)v, b, j) + h * D;
                    memcpy(s->v[g] + to, d->in[KV] + from, D * sizeof(float));
                    for (e = 0; e < D; e++)
                        s->g[g][to + e] = d->c->fresh ? (float)NAN : d->start[KV][from + e];
                }
            }
}

static void cache_free(cache *s) {
    size_t g;
    for (g = 0; g < s->count; g++) {
        free(s->v[g]);
        free(s->g[g]);
    }
}

/* Sets the args: the cached rows are in the groups' buffers, and k, v, dk and dv start
   at the block. */
static void cache_point(stx_ctx *x, const data *d, cache *s, stx_attention_args *a) {
    const size_t past = d->c->past, rows = past * a->kv_row_stride;
    size_t g;
    a->cached_rows = past;
    a->groups = s->count;
    memcpy(a->head_group, s->group, sizeof a->head_group);
    memcpy(a->head_index, s->index, sizeof a->head_index);
    a->k = skip(x, a->k, rows);
    a->v = skip(x, a->v, rows);
    a->dk = skip(x, a->dk, rows);
    a->dv = skip(x, a->dv, rows);
    for (g = 0; g < s->count; g++) {
        stx_attention_kv *o = &a->cached[g];
        s->dv[g] = up(x, s->v[g], s->n[g], STX_MEM_ACTIVATIONS);
        s->dg[g] = up(x, s->g[g], s->n[g], STX_MEM_ACTIVATIONS);
        o->k = s->dv[g];
        o->v = skip(x, s->dv[g], s->heads[g] * a->D);
        o->dk = s->dg[g];
        o->dv = skip(x, s->dg[g], s->heads[g] * a->D);
        o->rows = s->rows[g];
        o->row_stride = s->ld[g];
        o->batch_stride = s->st[g];
        if (d->c->fresh) a->overwrite |= STX_OVERWRITE_CACHED << g;
    }
}

/* Copies the gradients from the groups' buffers to the common buffer. */
static void cache_gather(stx_ctx *x, const data *d, cache *s, float *dkv) {
    const size_t past = d->c->past, D = d->a.D;
    size_t g, b, j, h, v, e, written = 0;
    for (g = 0; past && g < s->count; g++) {
        size_t wrong = 0;
        float *got = (float *)malloc(s->n[g] * sizeof(float));
        down(x, got, s->dg[g], s->n[g]);
        down(x, NULL, s->dv[g], 0);
        for (e = 0; e < s->n[g]; e++) wrong += s->g[g][e] == GAP && got[e] != GAP;
        CHECK(!wrong, "cached rows: %zu elements between the rows of group %zu were written: %s",
              wrong, g, label(d->c));
        free(s->g[g]);
        s->g[g] = got;
    }
    for (b = 0; b < d->a.B; b++)
        for (j = 0; j < past; j++)
            for (h = 0; h < d->a.H; h++)
                for (v = 0; v < 2; v++) {
                    const size_t to = kv_at(d, (int)v, b, j) + h * D, back = past - j;
                    const float *from = d->start[KV] + to;
                    g = s->group[h];
                    for (e = 0; e < D; e++) written += dkv[to + e] != UNUSED;
                    if (back <= s->rows[g]) from = s->g[g] + cache_at(s, d, v, b, back, h);
                    memcpy(dkv + to, from, D * sizeof(float));
                }
    CHECK(!written, "cached rows: %zu elements of the one buffer were written: %s", written,
          label(d->c));
}

/* Copies the inputs to the context. Cached rows of the common buffer are set to NaN. */
static void cached_inputs(stx_ctx *x, const data *d, stx_real **in) {
    size_t i, b, j;
    for (i = 0; i < INS; i++) {
        float *host = (float *)malloc((d->size[i] + 1) * sizeof *host);
        memcpy(host, d->in[i], d->size[i] * sizeof *host);
        for (b = 0; i == KV && b < d->a.B; b++)
            for (j = 0; j < d->c->past; j++) set_row(host, d, b, j, (float)NAN, (float)NAN);
        in[i] = up(x, host, d->size[i], is_stored(d->c, i) ? STX_MEM_ACTIVATIONS : STX_MEM_PARAMS);
        free(host);
    }
}

/* Copies the initial gradients to the context. In the common buffer, the gradients of
   cached rows are set to UNUSED. */
static void cached_grads(stx_ctx *x, const data *d, stx_real **grad) {
    size_t i, b, j, e;
    for (i = 0; i < GRADS; i++) {
        float *host = (float *)malloc((d->size[i] + 1) * sizeof *host);
        memcpy(host, d->start[i], d->size[i] * sizeof *host);
        if (d->c->fresh && (i == Q || i == KV))
            for (e = 0; e < d->size[i]; e++)
                if (owned(d, OUT_GRADS + i, e)) host[e] = (float)NAN;
        for (b = 0; i == KV && b < d->a.B; b++)
            for (j = 0; j < d->c->past; j++) set_row(host, d, b, j, UNUSED, UNUSED);
        grad[i] = up(x, host, d->size[i], is_stored(d->c, i) ? STX_MEM_ACTIVATIONS : STX_MEM_BYTES);
        free(host);
    }
}

/* Runs a case in context x. version: the kernel version, which is used only on a GPU. */
static void on_cached(stx_ctx *x, data *d, int version, float **out) {
    const int cuda = stx_ctx_desc(x)->device == STX_CUDA;
    const size_t past = d->c->past;
    stx_attention_args a;
    stx_real *in[INS], *grad[GRADS], *y, *top, *inv;
    void *pad = NULL;
    cache s;
    size_t i;
    cache_open(d, &s);
    if (cuda) stx_cuda_attention(x, version);
    cached_inputs(x, d, in);
    cached_grads(x, d, grad);
    y = up(x, NULL, d->size[DY], STX_MEM_ACTIVATIONS);
    top = up(x, NULL, d->rows, STX_MEM_BYTES);
    inv = up(x, NULL, d->rows, STX_MEM_BYTES);
    point(d, &a, in, grad, y, top, inv);
    offsets(d, x, &a);
    if (d->c->fresh) a.overwrite = STX_OVERWRITE_DQ | STX_OVERWRITE_DK | STX_OVERWRITE_DV;
    if (past) cache_point(x, d, &s, &a);
    if (d->pad && cuda) pad = cuda_bytes(x, d->pad, a.B * a.pad_batch_stride * sizeof *d->pad);
    a.pad = cuda ? (const int32_t *)pad : d->pad;
    run_pass(x, &a, 0);
    run_pass(x, &a, 1);
    CHECK(stx_ok(x), "cached rows, version %d: %s: %s", version, label(d->c), stx_error(x));
    down(x, out[OUT_Y], y, d->size[DY]);
    down(x, out[OUT_TOP], top, d->rows);
    down(x, out[OUT_INV], inv, d->rows);
    for (i = 0; i < GRADS; i++)
        down(x, d->size[i] ? out[OUT_GRADS + i] : NULL, grad[i], d->size[i]);
    for (i = 0; i < INS; i++) down(x, NULL, in[i], 0);
    if (pad) stx_cuda_free(x, pad);
    cache_gather(x, d, &s, out[OUT_GRADS + KV]);
    cache_free(&s);
}

static const attn cached_table[] = {
    {.B = 2, .T = 5, .S = 9, .H = 2, .D = 8, .past = 4},
    {.B = 2, .T = 33, .S = 70, .H = 2, .D = 16, .P = 70, .past = 37, .u = 1, .vb = 1},
    {.B = 2, .T = 33, .S = 70, .H = 2, .D = 16, .P = 70, .past = 37, .fresh = 1, .gap = 2,
     .dmin = 1},
    {.B = 1, .T = 64, .S = 192, .H = 3, .D = 32, .P = 192, .past = 128, .shared = 1, .dmin = 1,
     .z = 3, .fresh = 1},
    {.B = 2, .T = 40, .S = 240, .H = 5, .D = 16, .P = 240, .past = 200, .shared = 1, .dmin = 1,
     .z = 1, .sets = 3, .fresh = 1},
    {.B = 2, .T = 65, .S = 240, .H = 4, .D = 16, .P = 240, .past = 175, .shared = 1, .dmin = 1,
     .z = 3, .sets = 2},
    {.B = 1, .T = 70, .S = 300, .H = 6, .D = 64, .P = 300, .past = 230, .shared = 1, .dmin = 1,
     .z = 1, .sets = 3, .fresh = 1, .gap = 2, .drop = 0.2},
    {.B = 2, .T = 33, .S = 133, .H = 3, .D = 8, .past = 100, .z = 4, .L = 90, .R = 8, .sets = 3,
     .N = 5, .fresh = 1},
    {.B = 2, .T = 33, .S = 133, .H = 3, .D = 16, .P = 133, .past = 100, .pad = 1, .fresh = 1,
     .gap = 2},
    {.B = 2, .T = 20, .S = 150, .H = 2, .D = 16, .past = 130, .pad = 5, .z = 1, .L = 100, .R = 8,
     .sets = 2, .fresh = 1},
    {.B = 3, .T = 20, .S = 90, .H = 2, .D = 16, .past = 70, .span = 13, .fresh = 1},
    {.B = 1, .T = 40, .S = 130, .H = 3, .D = 72, .P = 130, .past = 90, .shared = 1, .dmin = 1,
     .z = 1, .sets = 2, .fresh = 1},
    {.B = 1, .T = 33, .S = 100, .H = 2, .D = 96, .P = 100, .past = 67, .u = 1, .vb = 1, .fresh = 1,
     .gap = 2},
    {.B = 1, .T = 33, .S = 100, .H = 2, .D = 120, .P = 100, .past = 67, .shared = 1, .dmin = 1},
    {.B = 1, .T = 20, .S = 90, .H = 2, .D = 16, .past = 70, .first = 40, .fresh = 1},
    {.B = 1, .T = 20, .S = 90, .H = 2, .D = 16, .P = 90, .past = 80, .first = 85, .fresh = 1},
    {.B = 2, .T = 33, .S = 60, .H = 2, .D = 5, .past = 27, .gap = 1, .fresh = 1},
    {.B = 2, .T = 33, .S = 90, .H = 3, .D = 7, .past = 57, .z = 4, .L = 64, .R = 2.7, .sets = 3,
     .gap = 1},
    {.B = 1, .T = 17, .S = 33, .H = 1, .D = 200, .past = 16, .fresh = 1},
    {.B = 2, .T = 3, .S = 80, .H = 4, .D = 16, .P = 80, .past = 77, .shared = 1, .dmin = 1, .z = 1,
     .L = 70, .R = 8, .sets = 3, .N = 2},
    {.B = 2, .T = 2, .S = 30, .H = 2, .D = 16, .past = 28, .pad = 1, .fresh = 1},
    {.B = 1, .T = 40, .S = 90, .H = 3, .D = 16, .P = 90, .past = 50, .dmin = 1, .z = 4, .L = 64,
     .R = 2.5, .no_renorm = 1, .fresh = 1},
    {.B = 1, .T = 40, .S = 90, .H = 3, .D = 16, .past = 50, .z = 2, .L = 60, .eps = 0.01,
     .fresh = 1},
    {.B = 2, .T = 40, .S = 70, .H = 2, .D = 16, .P = 200, .past = 30, .shared = 1, .first = -90,
     .dmin = 1, .fresh = 1},
    {.B = 2, .T = 2, .S = 70, .H = 2, .D = 16, .P = 100, .past = 68, .first = -20, .dmin = 1},
    {.B = 2, .T = 33, .S = 70, .H = 2, .D = 16, .P = 70, .fresh = 1},
    {.B = 2, .T = 20, .S = 30, .H = 2, .D = 16, .not_causal = 1, .pad = 4, .gap = 2, .fresh = 1},
    {.B = 1, .T = 20, .S = 70, .H = 2, .D = 16, .not_causal = 1, .first = 9, .u = 1, .fresh = 1},
    {.B = 2, .T = 40, .S = 70, .H = 2, .D = 16, .P = 200, .shared = 1, .first = -90, .dmin = 1,
     .fresh = 1},
    {.B = 1, .T = 200, .S = 700, .H = 4, .D = 64, .P = 700, .past = 500, .shared = 1, .dmin = 1,
     .z = 3, .L = 690, .sets = 3, .fresh = 1},
};

/* On the CPU, the results must be bit-identical to the results without cached rows,
   except for the sign of 0. */
static void cached_exact(const data *d, float **got) {
    size_t o, k;
    for (o = 0; o < OUTS; o++) {
        size_t wrong = 0;
        for (k = 0; k < d->out_size[o]; k++)
            wrong += got[o][k] != d->expected[o][k] && (o < OUT_GRADS || owned(d, o, k));
        CHECK(!wrong, "cached rows: %zu elements of %s differ on the CPU: %s", wrong, out_name[o],
              label(d->c));
    }
}

static void cached_all(int half) {
    size_t i, v;
    for (i = 0; i < sizeof cached_table / sizeof *cached_table; i++) {
        data d;
        float **got;
        data_open(&d, &cached_table[i], half, !cached_table[i].fresh);
        got = outputs(&d);
        on_cpu(cpu, &d);
        on_cached(cpu, &d, 0, got);
        if (d.a.T > 3 || d.a.drop > 0) cached_exact(&d, got);
        compare(&d, got, 0, 0, 0);
        for (v = 0; v < versions_of(half); v++) {
            on_cached(gpu[half], &d, versions[v], got);
            compare(&d, got, half, versions[v], 0);
        }
        outputs_free(got);
        data_close(&d);
    }
}


// >>dropout

/* Sets value j to unit vector j, and persistent value n to unit vector S + n. */
static void unit_values(data *d) {
    size_t b, j, h, i;
    for (b = 0; b < d->a.B; b++)
        for (j = 0; j < d->a.S; j++)
            for (h = 0; h < d->a.H; h++)
                for (i = 0; i < d->a.D; i++)
                    d->in[KV][kv_at(d, 1, b, j) + h * d->a.D + i] = i == j ? 1.0f : 0.0f;
    for (h = 0; h < d->a.H; h++)
        for (j = 0; j < d->a.N; j++)
            for (i = 0; i < d->a.D; i++)
                d->in[PV][(h * d->a.N + j) * d->a.D + i] = i == d->a.S + j ? 1.0f : 0.0f;
}

/* With unit vectors as values, y contains the attention weights. The GPU must drop
   exactly the weights that the CPU drops. Shifting the GPU's generator, as replayed
   steps do, must have the same effect as changing the CPU's stream. */
static void masks(int half) {
    static const attn cases[] = {
        {.B = 2, .T = 20, .S = 33, .H = 2, .D = 64, .drop = 0.5},
        {.B = 1, .T = 33, .S = 40, .H = 2, .D = 64, .drop = 0.3, .span = 19, .dmin = 1, .P = 25},
        {.B = 1, .T = 17, .S = 30, .H = 1, .D = 64, .drop = 0.7, .first = -11, .N = 9, .P = 60},
        {.B = 1, .T = 20, .S = 50, .H = 1, .D = 64, .drop = 0.4, .not_causal = 1, .first = 3},
        {.B = 2, .T = 50, .S = 37, .H = 1, .D = 64, .drop = 0.4, .not_causal = 1, .pad = 1},
        {.B = 2, .T = 33, .S = 60, .H = 1, .D = 64, .drop = 0.5, .pad = 7, .P = 60, .span = 41},
    };
    size_t k, v, i;
    for (k = 0; k < sizeof cases / sizeof *cases; k++)
        for (v = 0; v < versions_of(half); v++) {
            data d;
            float **got;
            long wrong = 0, zeros = 0;
            uint64_t shift = v ? (uint64_t)3 << 24 : 0;
            data_open(&d, cases + k, half, 0);
            unit_values(&d);
            got = outputs(&d);
            d.a.stream += shift;
            on_cpu(cpu, &d);
            d.a.stream -= shift;
            stx_cuda_rng_shift(gpu[half], shift);
            on_gpu(gpu[half], &d, versions[v], 0, got);
            stx_cuda_rng_shift(gpu[half], 0);
            for (i = 0; i < d.size[DY]; i++) {
                wrong += (got[OUT_Y][i] == 0) != (d.expected[OUT_Y][i] == 0);
                zeros += got[OUT_Y][i] == 0;
            }
            CHECK(!wrong && zeros > 0 && zeros < (long)d.size[DY],
                  "version %d: %ld of %zu weights are dropped on one device only: %s", versions[v],
                  wrong, d.size[DY], label(cases + k));
            compare(&d, got, half, versions[v], 0);
            outputs_free(got);
            data_close(&d);
        }
}

/* The fused kernels must support padded keys and calls that are not causal. A supported
   call must need less scratch than the same call with version 0. The last case is not
   supported. */
static void supported(int half) {
    static const attn cases[] = {
        {.B = 2, .T = 40, .S = 90, .H = 2, .D = 64, .P = 90, .z = 1, .L = 80, .R = 8, .u = 1,
         .vb = 1, .N = 3, .drop = 0.1, .pad = 1},
        {.B = 1, .T = 90, .S = 40, .H = 2, .D = 128, .not_causal = 1},
        {.B = 2, .T = 33, .S = 40, .H = 2, .D = 32, .not_causal = 1, .pad = 2, .first = 3},
        {.B = 2, .T = 33, .S = 40, .H = 2, .D = 32, .pad = 2, .first = -3},
    };
    size_t k, i;
    int backward;
    for (k = 0; k < 4; k++) {
        data d;
        stx_attention_args a;
        stx_real *in[INS], *grad[GRADS] = {NULL}, *y;
        data_open(&d, cases + k, half, 0);
        for (i = 0; i < INS; i++)
            in[i] = cuda_array(gpu[half], d.in[i], d.size[i],
                                 is_stored(d.c, i) ? STX_MEM_ACTIVATIONS : STX_MEM_PARAMS);
        y = cuda_array(gpu[half], NULL, d.size[DY], STX_MEM_ACTIVATIONS);
        grad[Q] = y; /* requested, but not computed */
        point(&d, &a, in, grad, y, y, y);
        offsets(&d, gpu[half], &a);
        a.pad = d.pad;
        for (backward = 0; backward < 2; backward++) {
            size_t fused, plain;
            stx_cuda_attention(gpu[half], 1);
            plain = stx_attention_work_cuda(gpu[half], &a, backward);
            stx_cuda_attention(gpu[half], 0);
            fused = stx_attention_work_cuda(gpu[half], &a, backward);
            CHECK(k == 3 ? fused == plain : fused && fused < plain / 4,
                  "%s: scratch of %zu bytes, version 0 has %zu: %s",
                  backward ? "backward" : "forward", fused, plain, label(cases + k));
        }
        for (i = 0; i < INS; i++) stx_cuda_free(gpu[half], in[i]);
        stx_cuda_free(gpu[half], y);
        data_close(&d);
    }
}


// >>masked keys and queries

/* Changes the keys that no query can reach (from first_key to `dead`), the keys that
   only the queries from `cut` on see, and these queries. */
static void change_unseen(data *d, size_t cut, size_t dead) {
    const attn *c = d->c;
    size_t b, j, e;
    for (b = 0; b < c->B; b++) {
        for (j = 0; j < c->S; j++) {
            /* keys that are too recent for every query before `cut`: delta < dmin */
            int later = j + c->T >= c->S + cut + 1 - (size_t)c->dmin;
            if ((j >= (size_t)STX_MAX(c->first, 0) && j < dead) || later)
                set_row(d->in[KV], d, b, j, 50, -70);
        }
        for (j = cut; j < c->T; j++)
            for (e = 0; e < c->H * c->D; e++) d->in[Q][q_at(d, b, j) + e] = 20;
    }
}

/* Keys before first_key are NaN. Changing keys beyond every head's span, later keys and
   later queries must not change a bit of earlier queries' results. */
static void unseen(int half) {
    static const attn cases[] = {
        {.B = 2, .T = 40, .S = 90, .H = 2, .D = 16, .P = 90, .shared = 1, .dmin = 1, .z = 2,
         .L = 100, .R = 8},
        {.B = 1, .T = 65, .S = 70, .H = 2, .D = 32, .P = 70, .u = 1, .vb = 1, .N = 3},
        {.B = 1, .T = 70, .S = 140, .H = 1, .D = 16, .span = 17, .first = 30, .drop = 0.2},
    };
    /* a head with Z_SHORT reaches at most 0.06 L + R + 1 keys */
    static const size_t reach[] = {15, 70, 17};
    size_t k, v, b, j, i;
    for (k = 0; k < 3; k++)
        for (v = 0; v < versions_of(half); v++) {
            const attn *c = cases + k;
            const size_t cut = c->T / 2 + 3, C = c->H * c->D;
            const size_t dead = c->S - c->T > reach[k] ? c->S - c->T - reach[k] : 0;
            data d;
            float **first, **got;
            size_t changed = 0;
            data_open(&d, c, half, 0);
            for (b = 0; b < c->B; b++)
                for (j = 0; (ptrdiff_t)j < c->first; j++)
                    set_row(d.in[KV], &d, b, j, (float)NAN, (float)NAN);
            first = outputs(&d);
            got = outputs(&d);
            on_gpu(gpu[half], &d, versions[v], FORWARD_ONLY, first);
            on_cpu(cpu, &d);
            compare(&d, first, half, versions[v], 1);
            change_unseen(&d, cut, dead);
            on_gpu(gpu[half], &d, versions[v], FORWARD_ONLY, got);
            for (b = 0; b < c->B; b++)
                changed += !!memcmp(first[OUT_Y] + b * c->T * C, got[OUT_Y] + b * c->T * C,
                                    cut * C * sizeof(float));
            CHECK(!changed, "version %d: a masked key or a later query changes a result: %s",
                  versions[v], label(c));
            for (changed = 0, i = cut; i < c->T; i++)
                changed += !!memcmp(first[OUT_Y] + i * C, got[OUT_Y] + i * C, C * sizeof(float));
            CHECK(changed == c->T - cut, "version %d: %zu of %zu later queries change: %s",
                  versions[v], changed, c->T - cut, label(c));
            outputs_free(first);
            outputs_free(got);
            data_close(&d);
        }
}


// >>gradients that are not requested

/* Requests only some of the gradients. The requested gradients must have the same bits
   as if all were requested, and the others must not be written. */
static void requested(int half) {
    static const attn cases[] = {
        {.B = 2, .T = 17, .S = 33, .H = 2, .D = 16, .P = 33, .shared = 1, .dmin = 1, .z = 1,
         .L = 30, .R = 8, .u = 1, .vb = 1, .N = 3},
        {.B = 1, .T = 33, .S = 64, .H = 2, .D = 32, .P = 64, .z = 1, .L = 50},
        {.B = 2, .T = 20, .S = 20, .H = 1, .D = 16},
    };
    size_t k, v, w, o;
    for (k = 0; k < 3; k++)
        for (v = 0; v < versions_of(half); v++) {
            data d;
            float **all, **got;
            data_open(&d, cases + k, half, 1);
            all = outputs(&d);
            got = outputs(&d);
            on_gpu(gpu[half], &d, versions[v], 0, all);
            for (w = 0; w <= GRADS; w++) {
                int good = 1;
                if (w < GRADS && !d.size[w]) continue;
                on_gpu(gpu[half], &d, versions[v], 1 << w, got);
                for (o = 0; o < OUTS; o++) {
                    /* without dv: only the first half of the buffer, dk */
                    size_t n = w == GRADS && o == OUT_GRADS + KV ? d.vo : d.out_size[o];
                    if (o != OUT_GRADS + w && memcmp(all[o], got[o], n * sizeof(float))) good = 0;
                }
                if (w == GRADS)
                    for (o = d.vo; o < d.size[KV]; o++)
                        if (got[OUT_GRADS + KV][o] != d.start[KV][o]) good = 0;
                CHECK(good, "version %d without %s: other gradients change: %s", versions[v],
                      w < GRADS ? out_name[OUT_GRADS + w] : "dv", label(cases + k));
            }
            outputs_free(all);
            outputs_free(got);
            data_close(&d);
        }
}



// >>repeatability

typedef struct again {
    data *d;
    stx_ctx *x;
    int version, without;
} again;

static void again_run(void *user, uint64_t *hash) {
    again *g = (again *)user;
    float **got = outputs(g->d);
    size_t o, i;
    on_gpu(g->x, g->d, g->version, g->without, got);
    for (o = 0; o < (g->without ? OUT_GRADS : OUTS); o++)
        for (i = 0; i < g->d->out_size[o]; i++) {
            uint32_t u;
            memcpy(&u, &got[o][i], 4);
            *hash = (*hash ^ u) * 1099511628211u;
        }
    outputs_free(got);
}

static void orders(int half) {
    static const attn cases[] = {
        {.B = 2, .T = 20, .S = 40, .H = 2, .D = 8, .P = 40, .shared = 1, .dmin = 1, .z = 1, .L = 40,
         .R = 8, .u = 1, .vb = 1, .N = 3, .drop = 0.2, .gap = 1},
        {.B = 1, .T = 65, .S = 130, .H = 1, .D = 32, .P = 130, .z = 1, .L = 100},
        {.B = 1, .T = 33, .S = 64, .H = 2, .D = 64, .P = 64, .u = 1, .vb = 1, .N = 5, .first = -9},
        {.B = 1, .T = 20, .S = 30, .H = 2, .D = 16, .first = 16, .eps = 1e-3, .z = 2, .L = 20,
         .R = 4},
        {.B = 2, .T = 65, .S = 210, .H = 1, .D = 16, .P = 210, .shared = 1, .dmin = 1, .z = 1,
         .L = 200, .u = 1, .drop = 0.2, .pad = 7, .N = 2},
        {.B = 2, .T = 70, .S = 150, .H = 1, .D = 64, .P = 150, .pad = 5},
        {.B = 2, .T = 80, .S = 33, .H = 2, .D = 16, .not_causal = 1, .pad = 1, .drop = 0.1},
        {.B = 1, .T = 40, .S = 100, .H = 1, .D = 72, .not_causal = 1, .N = 3, .u = 1},
    };
    size_t k, v;
    for (k = 0; k < sizeof cases / sizeof *cases; k++)
        for (v = 0; v < versions_of(half); v++) {
            data d;
            again g;
            data_open(&d, cases + k, half, 1);
            g.d = &d;
            g.x = gpu[half];
            g.version = versions[v];
            g.without = 0;
            cuda_orders(label(cases + k), again_run, &g);
            data_close(&d);
        }
}

/* The number of multiprocessors must not change a bit of the results, so the choice of
   tiles must not depend on it. Until a memory is full, first_key cuts off part of the
   windows, which have up to 100 keys. In such windows, wide and narrow tiles start at
   different keys and add the terms in different orders. */
static uint64_t bits_of(stx_ctx *x, data *d, int version) {
    again g;
    uint64_t h = 14695981039346656037u;
    g.d = d;
    g.x = x;
    g.version = version;
    g.without = FORWARD_ONLY;
    again_run(&g, &h);
    return h;
}

static void devices(int half) {
    static const attn cases[] = {
        /* 8 blocks of 128 queries */
        {.B = 1, .T = 128, .S = 188, .H = 8, .D = 16, .z = 1, .L = 90, .R = 9},
        {.B = 3, .T = 150, .S = 170, .H = 2, .D = 8, .z = 1, .L = 90, .R = 9, .dmin = 1, .P = 600,
         .drop = 0.2},
        /* 264 blocks: the smallest number for which wide tiles are chosen */
        {.B = 33, .T = 128, .S = 188, .H = 8, .D = 8, .z = 1, .L = 90, .R = 9},
    };
    static const int sms[] = {4, 132, 400};
    size_t k, n;
    for (k = 0; k < (half ? 3 : 1); k++) {
        data d;
        uint64_t narrow, wide;
        data_open(&d, cases + k, half, 0);
        d.a.span = 600; /* the model's span, which exceeds the memory */
        wide = bits_of(gpu[half], &d, 4);
        narrow = bits_of(gpu[half], &d, 2);
        CHECK(k == 2 ? narrow == wide : (narrow == wide) == !half,
              "case %d: tiles of 64 and of 128 queries give %s bits", (int)k,
              narrow == wide ? "the same" : "different");
        for (n = 0; n < 3; n++) {
            stx_ctx *x;
#ifdef SEQTX_CUDA_HOST
            cuda_host_sms(sms[n]);
#endif
            x = cuda_ctx(STX_CUDA, half ? STX_PREC_BF16 : STX_PREC_F32);
            CHECK(bits_of(x, &d, 2) == narrow,
                  "%s, case %d: different bits with %d multiprocessors", precision_name(half),
                  (int)k, sms[n]);
            stx_destroy(x);
        }
        data_close(&d);
    }
#ifdef SEQTX_CUDA_HOST
    cuda_host_sms(4);
#endif
}

#ifdef SEQTX_CUDA_HOST
/* The backward pass prefetches the next tile if there is enough shared memory, which
   depends on the GPU. Prefetching must not change the bits. If a kernel needs few
   registers, so many blocks share a multiprocessor that the shared memory is never
   sufficient. If it needs very many, the shared memory is always sufficient. */
static void ahead(int half) {
    static const attn cases[] = {
        {.B = 2, .T = 150, .S = 290, .H = 2, .D = 16, .P = 290, .shared = 1, .dmin = 1, .z = 1,
         .L = 200, .R = 8, .N = 70, .drop = 0.2},
        {.B = 1, .T = 140, .S = 200, .H = 2, .D = 64, .P = 200, .u = 1, .vb = 1, .N = 3, .z = 2,
         .L = 60},
        {.B = 1, .T = 70, .S = 330, .H = 1, .D = 32, .P = 330, .vb = 1, .pad = 5},
        {.B = 2, .T = 100, .S = 150, .H = 1, .D = 72, .u = 1, .N = 40, .pad = 7},
        {.B = 1, .T = 130, .S = 210, .H = 2, .D = 24, .not_causal = 1, .pad = 1},
    };
    size_t k, n, bytes[2];
    for (k = 0; k < sizeof cases / sizeof *cases; k++) {
        data d;
        uint64_t bits[2];
        data_open(&d, cases + k, half, 1);
        for (n = 0; n < 2; n++) {
            again g;
            g.d = &d;
            g.x = gpu[half];
            g.version = 2;
            g.without = 0;
            cuda_host_registers(n ? 512 : 16);
            bits[n] = 14695981039346656037u;
            bytes[n] = cuda_host_shared_requested();
            again_run(&g, bits + n);
            bytes[n] = cuda_host_shared_requested() - bytes[n];
        }
        cuda_host_registers(255);
        CHECK(bits[0] == bits[1], "%s: different bits with the next tile in shared memory: %s",
              precision_name(half), label(cases + k));
        CHECK(bytes[0] < bytes[1],
              "%s: %zu bytes of shared memory without the next tile, %zu with it: %s",
              precision_name(half), bytes[0], bytes[1], label(cases + k));
        data_close(&d);
    }
}

/* Returns the number of mma instructions of one pass according to the formulas of
   bench/cuda/cuda_model.h. */
static double mma_expected(const data *d, int version, int backward) {
    const attn *c = d->c;
    tiles t;
    config g;
    double n;
    int rows = version == 2 || version == 4;
    memset(&g, 0, sizeof g);
    g.dim = c->D;
    g.heads = 1;
    g.block = c->T;
    g.batch = c->B;
    t = tiles_of(&g, (double)(c->S - c->T), (double)d->a.span,
                 version == 4 && !backward && c->D <= 64);
    t.lo = (double)c->first;
    if (d->size[Z]) {
        double span = (double)d->in[Z][0] * (double)d->a.max_span;
        t.live = ceil(span + (double)d->a.ramp + 1) - 1;
        t.full = floor(span) + 1;
    }
    if (version == 6) rows = tiles_width(&t, t.live) <= floor(tiles_width(&t, t.span) / 32) * 16;
    n = tiles_vectors(&t, (double)c->N, backward);
    if (backward)
        n += tiles_queries(&t) + tiles_keys(&t) + (rows ? tiles_table(&t) : tiles_diagonals(&t));
    else
        n += tiles_forward(&t);
    /* an instruction handles 16 queries, 8 keys and 16 channels */
    return n * ((double)c->B * t.BK / 8 * t.DP / 16);
}

/* The formulas of bench/cuda/cuda_model.h must give exactly the number of mma
   instructions that the kernels execute. */
static void counted(void) {
    static const attn cases[] = {
        {.B = 1, .T = 200, .S = 520, .H = 1, .D = 64, .P = 320, .shared = 1, .dmin = 1},
        {.B = 2, .T = 130, .S = 450, .H = 1, .D = 40, .P = 320, .shared = 1, .dmin = 1, .z = 2,
         .L = 600, .R = 32},
        {.B = 1, .T = 190, .S = 190 + 133, .H = 1, .D = 96, .P = 133, .shared = 1, .dmin = 1,
         .N = 70},
        {.B = 1, .T = 100, .S = 340, .H = 1, .D = 16, .P = 240, .shared = 1, .dmin = 1, .z = 2,
         .L = 300, .R = 32, .N = 5},
        {.B = 1, .T = 130, .S = 330, .H = 1, .D = 128, .P = 200, .shared = 1, .dmin = 1, .z = 2,
         .L = 300, .R = 32},
        {.B = 1, .T = 150, .S = 450, .H = 1, .D = 32, .P = 300, .shared = 1, .dmin = 1, .z = 1,
         .L = 200, .R = 32, .N = 9},
        {.B = 1, .T = 93, .S = 293, .H = 1, .D = 64, .P = 200, .shared = 1, .dmin = 1,
         .first = 151},
        {.B = 1, .T = 93, .S = 293, .H = 1, .D = 88, .P = 200, .shared = 1, .dmin = 1, .first = 210,
         .N = 17},
    };
    static const int list[] = {2, 4, 5, 6}; /* version 6 has memory for half of the rows of dR */
    size_t k, v;
    int backward;
    for (k = 0; k < sizeof cases / sizeof *cases; k++)
        for (v = 0; v < 4; v++) {
            data d;
            float **got;
            long ran[2];
            data_open(&d, cases + k, 1, 0);
            got = outputs(&d);
            ran[0] = cuda_host_mmas();
            on_gpu(gpu[1], &d, list[v], FORWARD_ONLY, got);
            ran[0] = cuda_host_mmas() - ran[0];
            ran[1] = cuda_host_mmas();
            on_gpu(gpu[1], &d, list[v], 0, got);
            ran[1] = cuda_host_mmas() - ran[1] - ran[0];
            for (backward = 0; backward < 2; backward++) {
                double expected = mma_expected(&d, list[v], backward);
                CHECK((double)ran[backward] == expected,
                      "%s of version %d: %ld mma instructions, the model counts %.0f: %s",
                      backward ? "backward" : "forward", list[v], ran[backward], expected,
                      label(d.c));
            }
            outputs_free(got);
            data_close(&d);
        }
}

static int same_groups(const stx_head_groups *g, size_t H, int groups, const double *rows,
                       const double *heads) {
    size_t n[3] = {0, 0, 0}, h, i;
    for (h = 0; h < H; h++) n[g->of[h]]++;
    if (g->count != (size_t)groups) return 0;
    for (i = 0; i < g->count; i++)
        if (rows[i] != (double)g->rows[i] || heads[i] != (double)n[i]) return 0;
    return 1;
}

/* bench/cuda/cuda_model.h must divide the heads into the same groups as the library. */
static void counted_groups(void) {
    size_t k, l, h;
    for (k = 0; k < CONFIGS; k++) {
        const config *g = &configs[k];
        for (l = 0; l < g->layers; l++) {
            stx_head_groups got;
            size_t need[256];
            double rows[3], heads[3];
            int groups = groups_of(g, l, rows, heads);
            for (h = 0; h < g->heads; h++) need[h] = (size_t)keys_of(g, l, h) + 1;
            stx_head_groups_choose(need, g->heads, (size_t)window_of(g, l), &got);
            CHECK(same_groups(&got, g->heads, groups, rows, heads),
                  "%s, layer %zu: the library and the model cut heads differently", g->name, l);
        }
    }
}

/* Like counted_groups, for a model with few streams. In such a model, groups cost more
   than they save, because each step reorders their weights. */
static void counted_streams(void) {
    size_t B, l, h, cut[4] = {0, 0, 0, 0};
    config c = configs[2];
    stx_span_desc d;
    stx_ctx *x = cuda_ctx(STX_CPU, STX_PREC_F32);
    stx_span *m;
    memset(&d, 0, sizeof d);
    c.layers = 3;
    c.dim = c.inner = 320;
    d.vocab = 2;
    d.layers = 3;
    d.dim = d.inner = c.dim;
    d.heads = c.heads;
    d.span = c.span;
    d.adapt_span = 1;
    m = stx_span_create(x, &d);
    CHECK(m && d.heads == 8, "%s", stx_error(x));
    for (l = 0; l < 3; l++)
        for (h = 0; h < c.heads; h++)
            m->layer[l].z->data[h] = (stx_real)(span_of(&c, l, h) / (double)c.span);
    for (B = 1; B < 9; B++)
        for (l = 0; l < 3; l++) {
            stx_head_groups got;
            double rows[3], heads[3];
            int groups;
            c.batch = B;
            groups = groups_of(&c, l, rows, heads);
            CHECK((double)stx_span_window(m, l) == window_of(&c, l), "layer %zu: a window of %zu",
                  l, stx_span_window(m, l));
            inner_span_groups(m, l, B, stx_span_window(m, l), 0, &got);
            CHECK(same_groups(&got, c.heads, groups, rows, heads),
                  "%zu streams, layer %zu: %zu groups of heads, the model counts %d", B, l,
                  got.count, groups);
            cut[got.count]++;
        }
    CHECK(cut[1] && cut[2] + cut[3], "%zu layers with one group, %zu with two, %zu with three",
          cut[1], cut[2], cut[3]);
    stx_destroy(x);
}
#endif


// >>rows of dR

/* Returns the number of mma instructions so far. A real GPU does not count them; the
   result is then 0. */
static long mma_count(void) {
#ifdef SEQTX_CUDA_HOST
    return cuda_host_mmas();
#else
    return 0;
#endif
}

/* Compares a version's dpe with the diagonal sweep's dpe. */
static void compare_dpe(const data *d, const float *sweep, const float *dpe, int version) {
    double top = largest(sweep, d->size[PE], 0);
    double off = max_difference(sweep, dpe, d->size[PE]) / top;
    CHECK(off <= (d->c->acts ? 4e-3 : 2e-6), "version %d: dpe differs from the sweep's by %.2e: %s",
          version, off, label(d->c));
}

static const attn rows_table[] = {
    {.B = 2, .T = 130, .S = 430, .H = 3, .D = 64, .P = 300, .shared = 1, .dmin = 1, .z = 1,
     .L = 290},
    {.B = 3, .T = 90, .S = 390, .H = 2, .D = 32, .P = 300, .shared = 1, .dmin = 1, .z = 3,
     .L = 290, .R = 20, .N = 3, .drop = 0.2},
    /* a memory that is not full */
    {.B = 2, .T = 100, .S = 170, .H = 2, .D = 32, .P = 180, .first = 61, .vb = 1},
    /* no memory */
    {.B = 2, .T = 75, .S = 75, .H = 2, .D = 16, .P = 75, .u = 1, .vb = 1, .gap = 2},
    {.B = 1, .T = 33, .S = 150, .H = 2, .D = 72, .P = 150, .dmin = 1, .z = 3, .L = 120, .R = 8,
     .u = 1},
    {.B = 1, .T = 70, .S = 131, .H = 1, .D = 128, .P = 131, .vb = 1, .acts = 1},
    {.B = 2, .T = 130, .S = 330, .H = 2, .D = 96, .P = 200, .dmin = 1, .z = 1, .L = 180,
     .vb = 1},
    /* some strips see no key; no strip sees a key */
    {.B = 1, .T = 70, .S = 100, .H = 2, .D = 16, .P = 100, .first = 95, .dmin = 1},
    {.B = 1, .T = 40, .S = 40, .H = 2, .D = 16, .P = 40, .first = 40, .shared = 1},
    /* first_key is after the newest key that query 0 could see, and strip 0 sees almost
       no key */
    {.B = 1, .T = 70, .S = 100, .H = 2, .D = 16, .P = 99, .first = 50, .dmin = 1},
    /* blocks that contain the end of one head and the start of the next */
    {.B = 200, .T = 3, .S = 9, .H = 3, .D = 8, .P = 9, .shared = 1},
    {.B = 90, .T = 17, .S = 20, .H = 4, .D = 8, .P = 20, .vb = 1, .dmin = 1},
    {.B = 2, .T = 70, .S = 140, .H = 2, .D = 16, .P = 30, .span = 9, .shared = 1},
    {.B = 1, .T = 81, .S = 300, .H = 1, .D = 24, .P = 17, .loose = 1, .u = 1, .vb = 1},
    {.B = 1, .T = 1, .S = 77, .H = 4, .D = 64, .P = 77, .shared = 1, .z = 5, .L = 50},
};

/* Versions 5, 2 and 6 have memory for none, all and half of dR's rows. The gradient of
   the relative table is computed either from stored rows or by the diagonal sweep,
   which add the same bf16 terms in different orders. All other results must have the
   same bits. Each run has a new context, whose unwritten scratch is NaN. */
static void rows_of_dR(void) {
    static const int list[] = {5, 2, 6};
    long ran[3];
    size_t k, v, o;
    for (k = 0; k < sizeof rows_table / sizeof *rows_table; k++) {
        data d;
        float **out[3];
        data_open(&d, rows_table + k, 1, 1);
        for (v = 0; v < 3; v++) {
            stx_ctx *x = cuda_ctx(STX_CUDA, STX_PREC_BF16);
            out[v] = outputs(&d);
            ran[v] = mma_count();
            on_gpu(x, &d, list[v], 0, out[v]);
            ran[v] = mma_count() - ran[v];
            stx_destroy(x);
            for (o = 0; o < OUTS && v; o++)
                if (o != OUT_GRADS + PE)
                    CHECK(!memcmp(out[0][o], out[v][o], d.out_size[o] * sizeof(float)),
                          "version %d: %s has other bits than without rows of dR: %s", list[v],
                          out_name[o], label(d.c));
            compare_dpe(&d, out[0][OUT_GRADS + PE], out[v][OUT_GRADS + PE], list[v]);
        }
#ifdef SEQTX_CUDA_HOST
        /* Stored rows need fewer instructions, unless windows are short: the sweep
           computes only the key groups that a window touches, whereas rows consist of
           whole column blocks. */
        CHECK(k < 7 || k == 13 ? ran[1] < ran[0] : k == 8 || ran[1] != ran[0],
              "%ld mma instructions with rows of dR, %ld without: %s", ran[1], ran[0], label(d.c));
        CHECK(k > 1 || (ran[1] < ran[2] && ran[2] < ran[0]),
              "mma instructions with no rows, half and all: %ld, %ld, %ld: %s", ran[0], ran[2],
              ran[1], label(d.c));
#endif
        for (v = 0; v < 3; v++) outputs_free(out[v]);
        data_close(&d);
    }
    (void)ran;
}


// >>edges

/* Tests windows that end inside or next to every 16-key group of a tile, for various
   first keys and last queries, with positions and persistent vectors. If a strip of
   queries skips a key group that its queries see, the results here are wrong. If it
   computes an unnecessary group, counted() fails. Where cuda_fewer, half of the cases run
   in f32, the others in bf16. */
static void edges(int half) {
    static const size_t spans[] = {3, 8, 15, 16, 17, 31, 33, 48, 49, 63, 64, 65, 80, 97, 129},
                        sizes[] = {16, 64, 96, 128};
    static const ptrdiff_t firsts[] = {0, 5, 40, 79};
    size_t k, n;
    test_state = 7001;
    for (k = 0; k < sizeof spans / sizeof *spans; k++)
        for (n = 0; n < 4; n++) {
            attn c;
            if (cuda_fewer() && (k / 2 + n + (size_t)half) % 2) continue;
            memset(&c, 0, sizeof c);
            c.B = 1;
            c.H = 1;
            c.D = sizes[(k + n) % 4];
            c.T = 65 + (k * 5 + n * 3) % 17;
            c.S = c.T + 60 + (k * 11 + n * 7) % 19;
            c.span = spans[k];
            c.first = firsts[n];
            c.dmin = (int)((k + n / 2) % 2);
            if (n != 1) {
                c.P = spans[k] + (size_t)(1 - c.dmin);
                c.shared = 1;
                c.vb = n == 3;
            }
            c.N = n == 2 ? 1 + spans[k] / 2 : 0;
            /* n = 3: the exact dz of a single head may be 0, leaving only rounding
               errors */
            if (n == 3) {
                c.H = 3;
                c.z = 1;
                c.L = (double)spans[k];
                c.R = 9;
            }
            one_case(&c, half, 0, half ? 4 + 8 + 16 : 4);
        }
}

/* Runs the op in a training step on a GPU, with pad in device memory. */
static void padded_op(int half) {
    static const int32_t pad[2 * 12] = {1, 1, 0, 0, 3, 0, 0, 0, 0, 0, 0, -1,
                                        0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0};
    float *in[3], out[2][3 * 2 * 12 * 16], *dy;
    size_t size[3] = {2 * 8 * 16, 2 * 12 * 16, 2 * 12 * 16}, n, at, i;
    int k;
    for (n = 0; n < 3; n++) {
        in[n] = cuda_random(size[n], 1, 0);
        if (half) cuda_round(in[n], size[n]);
    }
    dy = cuda_random(size[0], 1, 0);
    if (half) cuda_round(dy, size[0]);
    for (k = 0; k < 2; k++) {
        stx_ctx *x = k ? gpu[half] : cpu;
        stx_attention_in ai;
        stx_attention_desc d;
        stx_tensor *t[3];
        memset(&ai, 0, sizeof ai);
        memset(&d, 0, sizeof d);
        d.heads = 2;
        if (k) stx_cuda_attention(x, 0);
        stx_begin(x, STX_TRAIN);
        for (n = 0; n < 3; n++) t[n] = stx_variable(x, in[n], 2, n ? 12 : 8, 16, 0);
        ai.q = t[0];
        ai.k = t[1];
        ai.v = t[2];
        ai.pad = stx_tokens(x, pad, 2, 12);
        stx_backward_from(x, stx_attention(x, &ai, &d), dy);
        CHECK(stx_ok(x), "%s", stx_error(x));
        for (n = at = 0; n < 3 && stx_ok(x); at += size[n++])
            stx_download(x, out[k] + at, t[n]->grad, size[n]);
    }
    for (i = 0, k = 1; i < size[0] + size[1] + size[2]; i++)
        if (!(fabs((double)(out[0][i] - out[1][i])) <= (half ? 2e-2 : 1e-5))) k = 0;
    CHECK(k, "%s: gradients of the op with padded keys", precision_name(half));
    for (n = 0; n < 3; n++) free(in[n]);
    free(dy);
}

/* TF32 has 11 binary digits: more than bf16, fewer than f32. With padded keys, some
   head sizes use f32 in the query sweep. */
static void tf32(void) {
    static const attn cases[] = {
        {.B = 2, .T = 33, .S = 70, .H = 2, .D = 72, .P = 70, .u = 1, .z = 1, .L = 60, .R = 8},
        {.B = 2, .T = 33, .S = 70, .H = 2, .D = 72, .P = 70, .u = 1, .z = 1, .L = 60, .R = 8,
         .N = 3, .pad = 1},
        {.B = 2, .T = 33, .S = 70, .H = 2, .D = 32, .P = 70, .pad = 5, .drop = 0.2},
        {.B = 2, .T = 33, .S = 70, .H = 2, .D = 32, .P = 70, .u = 1},
        {.B = 1, .T = 33, .S = 70, .H = 2, .D = 64, .P = 70},
        {.B = 2, .T = 70, .S = 33, .H = 2, .D = 64, .not_causal = 1, .pad = 6},
        {.B = 1, .T = 70, .S = 33, .H = 2, .D = 16, .not_causal = 1, .drop = 0.1},
    };
    stx_desc desc;
    stx_ctx *x;
    size_t k;
    memset(&desc, 0, sizeof desc);
    desc.device = STX_CUDA;
    desc.threads = 1;
    desc.tf32 = 1;
    x = stx_create(&desc);
    for (k = 0; k < sizeof cases / sizeof *cases; k++) {
        data d;
        float **got;
        data_open(&d, cases + k, 0, 0);
        got = outputs(&d);
        on_cpu(cpu, &d);
        on_gpu(x, &d, 2, 0, got);
        compare(&d, got, 1, 2, 0);
        outputs_free(got);
        data_close(&d);
    }
    stx_destroy(x);
}

// >>errors and scratch

static void refused(void) {
    stx_ctx *x = gpu[0];
    stx_attention_args a;
    memset(&a, 0, sizeof a);
    a.B = a.T = a.S = a.D = 1;
    a.H = 257;
    CHECK(stx_attention_work_cuda(x, &a, 0) == 0, "scratch for 257 heads");
    stx_attention_fwd_cuda(x, &a);
    CHECK(stx_error_code(x) == STX_ERR_SHAPE
              && strstr(stx_error(x), "stx_attention_fwd: heads: expected at most 256, got 257"),
          "%s", stx_error(x));
    stx_clear_error(x);
    stx_attention_bwd_cuda(x, &a);
    CHECK(stx_error_code(x) == STX_ERR_SHAPE
              && strstr(stx_error(x), "stx_attention_bwd: heads: expected at most 256, got 257"),
          "%s", stx_error(x));
    stx_clear_error(x);
    a.H = 2;
    a.T = 0;
    CHECK(stx_attention_work_cuda(x, &a, 1) == 0, "scratch without queries");
    stx_attention_fwd_cuda(x, &a);
    stx_attention_bwd_cuda(x, &a);
    CHECK(stx_ok(x), "%s", stx_error(x));
}

static void scratch_bounds(void) {
    stx_ctx *x = gpu[0];
    stx_attention_args a;
    size_t fused, plain, forward;
    memset(&a, 0, sizeof a);
    a.B = 64;
    a.T = 1024;
    a.S = 9216;
    a.H = 8;
    a.D = 64;
    a.P = 8192;
    a.pe_heads = 1;
    a.span = 8192;
    a.delta_min = 1;
    a.dpe = a.dk = a.dv = (stx_real *)&a;
    stx_cuda_attention(x, 1);
    forward = stx_attention_work_cuda(x, &a, 0);
    plain = stx_attention_work_cuda(x, &a, 1);
    CHECK(forward < (size_t)280 << 20 && plain < (size_t)280 << 20,
          "scratch of version 0: expected less than 280 MiB, got %zu and %zu bytes", forward,
          plain);

    /* The backward pass has more 32-query tiles than fit in an int. The forward pass,
       with 64-query tiles, does not. Version 0 computes the gradients. */
    memset(&a, 0, sizeof a);
    a.B = 64;
    a.H = 256;
    a.D = 72;
    a.T = a.S = a.span = (size_t)1 << 22;
    a.scale = 1;
    a.dq = (stx_real *)&a;
    plain = stx_attention_work_cuda(x, &a, 1);
    stx_cuda_attention(x, 0);
    fused = stx_attention_work_cuda(x, &a, 1);
    CHECK(fused == plain, "2^31 tiles: scratch of %zu, version 0 has %zu", fused, plain);
    a.T -= 32;
    fused = stx_attention_work_cuda(x, &a, 1);
    CHECK(fused >= a.B * a.H * a.T * 4,
          "2^31 - 2^14 tiles: scratch of %zu is not that of the fused kernels", fused);
}

#ifdef SEQTX_CUDA_HOST
/* Prints one line per kernel for tests/cuda/cuda_regs.sh --table: name, channels, `two`,
   threads, bytes of dynamic shared memory, and the additional bytes for prefetching the
   next tile. */
static void kernels(void) {
    static const size_t channels[] = {32, 64, 96, 128};
    size_t i;
    int two, n, k;
    for (i = 0; i < 4; i++)
        for (two = 0; two < 2; two++) {
            inner_fused_kernel list[INNER_FUSED];
            for (k = 0, n = inner_fused(gpu[1], channels[i], two, list); k < n; k++)
                printf("%s %zu %d %d %zu %zu\n", list[k].name, channels[i], two, list[k].threads,
                       list[k].shared, list[k].more);
        }
}
#endif


// >>main

static int only = -1, brief; /* only: the one section to run, or -1; brief: whether to
                                run the short form, for sanitizers */

static int wanted(int section) {
    return only < 0 || only == section;
}

/* Each case runs with all versions; where cuda_fewer, with every other one; in the short
   form, with one. */
static void table_cases(int half) {
    size_t i;
    for (i = 0; i < TABLE; i++) {
        size_t turn = i + (size_t)half;
        unsigned which = cuda_fewer() ? 21u << turn % 2 : 63;
        if (brief) which = 1u << turn % versions_of(half);
        one_case(table + i, half, (int)(i % 3 == 1), which);
    }
}

static void random_cases(int half) {
    size_t i;
    for (i = 0; i < 60; i++) {
        attn c = random_case();
        if (i >= 40) c.pad = 1 + (int)(i % 4);
        /* the exact gradient of a single vector is 0, which leaves only rounding
           errors */
        if (c.pad && c.N == 1) c.N = 2;
        /* version 0 with all of its scratch or with little, and the fused kernels */
        one_case(&c, half, (int)(i % 2), (i / 2 + i / 4 + (size_t)half) % 2 ? 16 + 14 : 32 + 13);
    }
}

static void run_all(void) {
    int half;
    for (half = 0; half < 2; half++) {
        test_state = 20250;
        if (wanted(0)) table_cases(half);
        if (wanted(1)) random_cases(half);
        padded_op(half);
        supported(half);
        if (wanted(11) || brief) cached_all(half);
        if (wanted(2)) masks(half);
        if (wanted(3)) unseen(half);
        if (wanted(4)) requested(half);
        if (wanted(5)) orders(half);
        if (wanted(6)) devices(half);
        if (wanted(11)) edges(half);
#ifdef SEQTX_CUDA_HOST
        if (wanted(8)) ahead(half);
#endif
    }
    if (wanted(7)) tf32();
    if (wanted(10) || brief) rows_of_dR();
#ifdef SEQTX_CUDA_HOST
    if (wanted(9)) {
        counted();
        counted_groups();
        counted_streams();
    }
#endif
    refused();
    scratch_bounds();
}

/* Arguments: "short", "kernels", or the number of a section. */
int main(int argc, char **argv) {
    const char *part = argc > 1 ? argv[1] : "";
    int half, i;
    brief = !strcmp(part, "short");
    if (*part) only = brief ? 0 : atoi(part);
    cpu = cuda_ctx(STX_CPU, STX_PREC_F32);
    gpu[0] = cuda_ctx(STX_CUDA, STX_PREC_F32);
    gpu[1] = cuda_ctx(STX_CUDA, STX_PREC_BF16);
    for (half = 0; half < 2; half++)
        if (!stx_ok(gpu[half])) {
            printf("%s\n", stx_error(gpu[half]));
            return 1;
        }
#ifdef SEQTX_CUDA_HOST
    if (!strcmp(part, "kernels")) {
        kernels();
        return 0;
    }
#endif
    run_all();
    for (half = 0; half < 2; half++) {
        printf("%s: largest errors", precision_name(half));
        for (i = 0; i < OUTS; i++) printf("%s %s %.1e", i ? "," : "", out_name[i], worst[half][i]);
        printf("\n");
    }
    stx_destroy(cpu);
    stx_destroy(gpu[0]);
    stx_destroy(gpu[1]);
    return cuda_test_end();
}
