/* test_cuda_attention.c - stx_attention_fwd_cuda and stx_attention_bwd_cuda against
   their CPU twins: every feature of the attention and many of their combinations, by
   version 0 (with memory and without) and by the fused kernels where they take the
   call; in float and in bfloat16. Dropout masks cell by cell, what must not be seen,
   gradients that are not wanted, memory between the rows, repeatability. */
#include "../seqtx.h"
#include "cuda_test.h"
#ifdef SEQTX_CUDA_HOST
  #include "../seqtx_attn_span.h"
  #include "../bench/cuda_model.h"
  #include "inner.h"
#endif

/* >>cases */
typedef struct attn {
    size_t B, T, S, H, D, P, N; /* P 0: no pe */
    int shared, u, vb;          /* shared: pe by all heads */
    /* 0 none, 1 a mixture, 2 all short, 3 one long among short, 4 on the ramp's ends,
       5 beyond them */
    int z;
    int z_one, no_renorm;        /* one z for all heads; the mask outside the normaliser */
    size_t span;                 /* 0: all there are */
    int dmin, not_causal, loose; /* loose: span may go beyond pe, whose rows are zero there */
    ptrdiff_t first;
    /* 0: 1/sqrt(D), 150, 32, 0, 0, 1; big: the size of q and k */
    double scale, L, R, eps, drop, big;
    /* 0: rows side by side; 1: odd strides and offsets; 2: q, k, v slices of one row,
       multiples of 8 */
    int gap;
    int acts;    /* pe, u, vb, pk, pv are activations */
    size_t past; /* keys that stand apart: sides() */
    /* of so many groups of heads; gradients are written, not added to */
    int sets, fresh;
    int pad; /* padded keys, which hold NaN: 0 none, 1 scattered, 2 before the sequence, 3 all of batch row 0, 4 all
                                     but a few,
                                     5 every other 64, shifted by batch row, 6 the first 3
                                     and the last 2, 7 a hole from 1/4 to 3/4 */
} attn;

enum { Q, KV, PE, U, VB, Z, PK, PV, DY, INS, GRADS = DY }; /* k and v in one buffer */

enum { OUT_Y, OUT_TOP, OUT_INV, OUT_GRADS, OUTS = OUT_GRADS + GRADS };

static const char *const out_name[OUTS] = {"y",  "top", "inv", "dq",  "dk, dv", "dpe",
                                           "du", "dvb", "dz",  "dpk", "dpv"};

static const char *label(const attn *c) {
    static char t[400];
    snprintf(
        t, sizeof t,
        "B %zu T %zu S %zu H %zu D %zu P %zu%s%s%s z %d%s N %zu dmin %d span %zu eps %g%s first "
        "%ld%s%s scale %g L %g "
        "R %g drop %g big %g gap %d%s pad %d",
        c->B, c->T, c->S, c->H, c->D, c->P, c->P ? (c->shared ? " shared" : " per head") : "",
        c->u ? " u" : "", c->vb ? " vb" : "", c->z, c->z_one ? " for all" : "", c->N, c->dmin,
        c->span, c->eps, c->no_renorm ? " no renorm" : "", (long)c->first,
        c->not_causal ? " not causal" : "", c->loose ? " loose" : "", c->scale, c->L, c->R, c->drop,
        c->big, c->gap, c->acts ? " activations" : "", c->pad);
    return t;
}

/* Everything of one case on the host: inputs, what gradients begin with, and what the
   CPU makes of them */
typedef struct data {
    const attn *c;
    stx_attention_args a;               /* sizes and scalars; the pointers are of the run at hand */
    size_t size[INS], qo, ko, vo, rows; /* offsets of q, k, v in their buffers; B H T */
    float *in[INS], *start[GRADS], *want[OUTS];
    size_t out_size[OUTS];
    int32_t *pad; /* (B, S + 3), or NULL */
} data;

/* Points the args at buffers: in, start of gradients (NULL: not wanted), y, top, inv */
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

/* p + n elements, as they are stored there */
static stx_real *skip(stx_ctx *x, const stx_real *p, size_t n) {
    if (!p) return NULL;
    return (
        stx_real *)(void *)((char *)(uintptr_t)p
                            + n
                                  * (stx_ctx_desc(x)->device == STX_CUDA && stx_cuda_is_bf16(x, p)
                                         ? 2
                                         : sizeof(stx_real)));
}

static void offsets(data *d, stx_ctx *x, stx_attention_args *a) {
    a->q = skip(x, a->q, d->qo);
    a->k = skip(x, a->k, d->ko);
    a->v = skip(x, a->v, d->vo);
    a->dq = skip(x, a->dq, d->qo);
    a->dk = skip(x, a->dk, d->ko);
    a->dv = skip(x, a->dv, d->vo);
}

/* half: inputs that a bf16 context can store; add: gradients do not begin at 0 */
static void data_open(data *d, const attn *c, int half, int add) {
    stx_attention_args *a = &d->a;
    size_t C = c->H * c->D, i, h, n, gap = c->gap == 1 ? 3 : 8;
    double L = c->L > 0 ? c->L : 150;
    memset(d, 0, sizeof *d);
    d->c = c;
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
    /* as stx_attention resolves them */
    a->first_key = c->first < (ptrdiff_t)c->S ? c->first : (ptrdiff_t)c->S;
    a->span = c->S + (c->first < 0 ? (size_t)-c->first : 0);
    if (c->span && c->span < a->span) a->span = c->span;
    if (c->first < 0 && (size_t)-c->first > a->span) a->first_key = -(ptrdiff_t)a->span;
    if (c->P && !c->loose && a->span > c->P + (size_t)c->dmin - 1)
        a->span = c->P + (size_t)c->dmin - 1;
    a->scale = (stx_real)(c->scale != 0 ? c->scale : 1 / sqrt((double)c->D));
    a->max_span = (stx_real)L;
    a->ramp = (stx_real)(c->R > 0 ? c->R : 32);
    a->eps = (stx_real)c->eps;
    a->drop = (stx_real)c->drop;
    if (c->pad) {
        static const int32_t marks[] = {1, -1, 1 << 30, 2};
        size_t b, j;
        a->pad_batch_stride = c->S + 3;
        d->pad = (int32_t *)calloc(c->B * a->pad_batch_stride, sizeof *d->pad);
        for (b = 0; b < c->B; b++)
            for (j = 0; j < c->S; j++)
                if (c->pad == 1   ? test_rand() < -0.2
                    : c->pad == 2 ? j < c->S * (b + 1) / 3
                    : c->pad == 3 ? b == 0 || j % 2
                    : c->pad == 4 ? j % 19 != b + 1
                    : c->pad == 5 ? (j / 64 + b) % 2 == 0
                    : c->pad == 6 ? j < 3 || j + 2 >= c->S
                                  : j >= c->S / 4 && j < c->S * 3 / 4)
                    d->pad[b * a->pad_batch_stride + j] = marks[j % 4];
    }
    a->seed = 0x1234567890abcdefu;
    a->stream = ((uint64_t)7 << 24) + 5;
    if (c->gap == 0) {
        a->q_row_stride = a->kv_row_stride = C;
        a->q_batch_stride = c->T * C;
        a->kv_batch_stride = c->S * C;
        d->vo = c->B * a->kv_batch_stride;
        d->size[Q] = c->B * a->q_batch_stride;
        d->size[KV] = 2 * c->B * a->kv_batch_stride;
    } else {
        a->q_row_stride = 3 * C + gap;
        a->q_batch_stride = (c->T + 1) * a->q_row_stride + gap - 3;
        a->kv_row_stride = 2 * C + 2 * gap + (c->gap == 1 ? 1 : 0);
        a->kv_batch_stride = (c->S + 2) * a->kv_row_stride + (c->gap == 1 ? 5 : 16);
        if (c->gap == 2) a->q_batch_stride = (a->q_batch_stride + 7) / 8 * 8;
        d->qo = gap;
        d->ko = 2 * gap;
        d->vo = d->ko + C + gap;
        if (c->gap == 1) d->vo--;
        d->size[Q] = d->qo + c->B * a->q_batch_stride;
        d->size[KV] = d->vo + c->B * a->kv_batch_stride + C;
    }
    d->size[DY] = c->B * c->T * C;
    d->size[PE] = c->P * (c->shared ? c->D : C);
    d->size[U] = c->u ? C : 0;
    d->size[VB] = c->vb && c->P ? C : 0;
    d->size[Z] = c->z ? c->z_one ? 1 : c->H : 0;
    d->size[PK] = d->size[PV] = c->N * C;
    d->rows = c->B * c->H * c->T;
    for (i = 0; i < INS; i++) {
        double s = (i == Q || i == KV) && c->big > 0 ? c->big : 1;
        d->in[i] = cuda_random(d->size[i], s, 0);
        /* parameters too: their bfloat16 copies are as good then */
        if (half && i != Z) cuda_round(d->in[i], d->size[i]);
    }
    for (i = 0; d->pad && i < c->B; i++)
        for (h = 0; h < c->S; h++)
            for (n = 0; d->pad[i * a->pad_batch_stride + h] && n < C; n++)
                d->in[KV][d->ko + i * a->kv_batch_stride + h * a->kv_row_stride + n] =
                    d->in[KV][d->vo + i * a->kv_batch_stride + h * a->kv_row_stride + n] =
                        (float)NAN;
    for (h = 0; h < d->size[Z]; h++) { /* off the kinks of the ramp, but for kinds 4 and 5 */
        double f = c->z == 2   ? 0.03 * (double)(h % 3)
                   : c->z == 3 ? (h == c->H / 2 ? 0.97 : 0.01)
                               : 0.05 + 0.9 * (double)((h * 7 + 3) % 11) / 11;
        static const float ends[] = {0, 1, 0.5f, 0.25f}, beyond[] = {-0.3f, 1.7f, 0.4f, -5};
        d->in[Z][h] = c->z == 4   ? ends[h % 4]
                      : c->z == 5 ? beyond[h % 4]
                                  : (float)((floor(f * L) + 0.37) / L);
    }
    for (i = 0; i < GRADS; i++) {
        int stored = i == Q || i == KV || (c->acts && i != Z);
        d->start[i] = cuda_random(d->size[i], 1, 0);
        if (!add)
            for (n = 0; n < d->size[i]; n++) d->start[i][n] = 0;
        if (half && stored) cuda_round(d->start[i], d->size[i]);
    }
    d->out_size[OUT_Y] = d->size[DY];
    d->out_size[OUT_TOP] = d->out_size[OUT_INV] = d->rows;
    for (i = 0; i < GRADS; i++) d->out_size[OUT_GRADS + i] = d->size[i];
    for (i = 0; i < OUTS; i++) d->want[i] = (float *)calloc(d->out_size[i] + 1, sizeof(float));
}

static void data_close(data *d) {
    size_t i;
    free(d->pad);
    for (i = 0; i < INS; i++) free(d->in[i]);
    for (i = 0; i < GRADS; i++) free(d->start[i]);
    for (i = 0; i < OUTS; i++) free(d->want[i]);
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

static void on_cpu(stx_ctx *x, data *d) {
    stx_attention_args a;
    stx_real *grad[GRADS];
    size_t i;
    for (i = 0; i < GRADS; i++) {
        grad[i] = d->want[OUT_GRADS + i];
        memcpy(grad[i], d->start[i], d->size[i] * sizeof(float));
    }
    point(d, &a, d->in, grad, d->want[OUT_Y], d->want[OUT_TOP], d->want[OUT_INV]);
    offsets(d, x, &a);
    a.pad = d->pad;
    a.work = malloc(stx_attention_work(x, &a, 0) + 1);
    stx_attention_fwd(x, &a);
    free(a.work);
    a.work = malloc(stx_attention_work(x, &a, 1) + 1);
    stx_attention_bwd(x, &a);
    free(a.work);
    CHECK(stx_ok(x), "%s: %s", label(d->c), stx_error(x));
}

enum { FORWARD_ONLY = 1 << 16 };

/* without: bits of the gradients that are not wanted (bit GRADS: dv alone;
   FORWARD_ONLY: none is) */
static void on_gpu(stx_ctx *x, data *d, int version, int without, float **out) {
    stx_attention_args a;
    stx_real *in[INS], *grad[GRADS], *y, *top, *inv;
    void *pad = NULL;
    size_t i, bytes;
    stx_cuda_attention(x, version);
    for (i = 0; i < INS; i++) {
        int stored = i == Q || i == KV || i == DY || (d->c->acts && i != Z);
        in[i] = cuda_numbers(x, d->in[i], d->size[i],
                             stored ? STX_MEM_ACTIVATIONS : STX_MEM_PARAMS);
    }
    for (i = 0; i < GRADS; i++) {
        int stored = i == Q || i == KV || (d->c->acts && i != Z);
        grad[i] = without & 1 << i ? NULL
                                   : cuda_numbers(x, d->start[i], d->size[i],
                                                  stored ? STX_MEM_ACTIVATIONS : STX_MEM_BYTES);
    }
    y = cuda_numbers(x, NULL, d->size[DY], STX_MEM_ACTIVATIONS);
    top = cuda_numbers(x, NULL, d->rows, STX_MEM_BYTES);
    inv = cuda_numbers(x, NULL, d->rows, STX_MEM_BYTES);
    point(d, &a, in, grad, y, top, inv);
    offsets(d, x, &a);
    if (without & 1 << GRADS) a.dv = NULL;
    if (d->pad)
        a.pad = (const int32_t *)(pad = cuda_bytes(x, d->pad,
                                                   a.B * a.pad_batch_stride * sizeof *d->pad));
    bytes = stx_attention_work_cuda(x, &a, 0);
    a.work = cuda_bytes(x, NULL, bytes);
    stx_attention_fwd_cuda(x, &a);
    stx_cuda_free(x, a.work);
    if (!(without & FORWARD_ONLY)) {
        a.work = NULL;
        bytes = stx_attention_work_cuda(x, &a, 1);
        a.work = cuda_bytes(x, NULL, bytes);
        stx_attention_bwd_cuda(x, &a);
        stx_cuda_free(x, a.work);
    }
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

/* >>comparison Errors are measured by the largest entry of a tensor, or by the floor
   where that is less: a gradient may be what cancels (a row of one key has ds = 0), its
   terms are of order 1 then.
     float: sums of up to a few hundred terms, in another order, each rounded to 6e-8,
     under e^s: 1e-5; and a logit of size s is rounded to 6e-8 s, which changes its
     weight as much (cases with big logits, 3000: 1e-3) bf16: y and the gradients of
     activations are stored with 8 digits (2e-3 of an entry); the fused kernels round q
     + u, weights and ds to 8 digits as well, which moves a logit of size 4 by 1e-2 and
     its weight as much: 1.5e-2. dz and the tables' gradients are sums of terms of both
     signs, whose errors do not shrink as they do: 4e-2. Where logits are big, 8 digits
     decide nothing: version 0 is float inside, of the fused kernels only finite
     numbers of the right order are asked. */
static const double FLOAT = 1e-5, HALF = 1.5e-2, HALF_SUMS = 4e-2;
static double worst[2][OUTS];

/* The gaps between rows belong to somebody else. */
static int owned(const data *d, size_t out, size_t i) {
    const stx_attention_args *a = &d->a;
    size_t C = a->H * a->D, k;
    if (d->c->gap == 0 || (out != OUT_GRADS + Q && out != OUT_GRADS + KV)) return 1;
    if (out == OUT_GRADS + Q)
        return i >= d->qo && (i - d->qo) / a->q_batch_stride < a->B
               && (i - d->qo) % a->q_batch_stride / a->q_row_stride < a->T
               && (i - d->qo) % a->q_batch_stride % a->q_row_stride < C;
    for (k = 0; k < 2; k++) {
        size_t o = k ? d->vo : d->ko;
        if (i >= o && (i - o) / a->kv_batch_stride < a->B
            && (i - o) % a->kv_batch_stride / a->kv_row_stride < a->S
            && (i - o) % a->kv_batch_stride % a->kv_row_stride < C)
            return 1;
    }
    return 0;
}

static void compare(const data *d, float **got, int half, int version, int forward_only) {
    size_t o, i;
    double logit = 0;
    for (i = 0; i < d->rows; i++)
        if (fabs((double)d->want[OUT_TOP][i]) <= 1e30 && fabs((double)d->want[OUT_TOP][i]) > logit)
            logit = fabs((double)d->want[OUT_TOP][i]);
    for (o = 0; o < (size_t)(forward_only ? OUT_GRADS : OUTS); o++) {
        double tol = !half                                         ? FLOAT + 4e-7 * logit
                     : version != 1 && version != 3 && logit > 100 ? 3
                     : o >= OUT_GRADS + PE                         ? HALF_SUMS
                                                                   : HALF,
               top = o < OUT_GRADS ? 0
                     : half        ? 0.5
                                   : 0.1,
               off = 0;
        int exact = 1;
        if (o == OUT_GRADS + Z) top *= STX_MAX(1, (double)d->a.max_span / (double)d->a.ramp);
        /* 0 where nothing is seen; else e^top / inv, the row's mass, by its logarithm */
        if (o == OUT_INV) {
            for (i = 0; i < d->rows; i++) {
                double g = (double)got[OUT_INV][i], w = (double)d->want[OUT_INV][i], e;
                if (g == 0 || w == 0) {
                    if (!(g == w)) exact = 0;
                    continue;
                }
                e = fabs((double)got[OUT_TOP][i] - log(g) - ((double)d->want[OUT_TOP][i] - log(w)))
                    / STX_MAX(1, fabs((double)d->want[OUT_TOP][i]));
                if (!(e <= 1e300))
                    off = HUGE_VAL;
                else if (e > off)
                    off = e;
            }
        } else {
            for (i = 0; i < d->out_size[o]; i++)
                if (fabs((double)d->want[o][i]) <= 1e30 && fabs((double)d->want[o][i]) > top)
                    top = fabs((double)d->want[o][i]);
            for (i = 0; i < d->out_size[o]; i++) {
                /* -inf: top, nothing seen */
                double g = (double)got[o][i], w = (double)d->want[o][i],
                       e = g == w ? 0 : fabs(g - w);
                if (o >= OUT_GRADS && !owned(d, o, i)) {
                    if (memcmp(&got[o][i], &d->start[o - OUT_GRADS][i], sizeof(float))) exact = 0;
                    continue;
                }
                if (!(e <= 1e300))
                    off = HUGE_VAL;
                else if (e > off)
                    off = e;
            }
            if (off > 0) off /= top > 0 ? top : 1;
        }
        if (off > worst[half][o]) worst[half][o] = off;
        CHECK(off <= tol, "%s of version %d, %s: off by %.2e: %s", out_name[o], version,
              half ? "bf16" : "float", off, label(d->c));
        /* padded keys: what was there */
        for (i = 0; d->pad && o == OUT_GRADS + KV && i < d->a.B * d->a.S; i++) {
            size_t at = i / d->a.S * d->a.kv_batch_stride + i % d->a.S * d->a.kv_row_stride, e;
            for (e = 0;
                 e < d->a.H * d->a.D && d->pad[i / d->a.S * d->a.pad_batch_stride + i % d->a.S];
                 e++)
                if (got[o][d->ko + at + e] != d->start[KV][d->ko + at + e]
                    || got[o][d->vo + at + e] != d->start[KV][d->vo + at + e])
                    exact = 0;
        }
        CHECK(
            exact,
            "%s of version %d, %s: a gap was written, or a row that sees nothing, or a padded "
            "key: %s",
            out_name[o], version, half ? "bf16" : "float", label(d->c));
    }
}

static stx_ctx *cpu, *gpu[2]; /* float, bf16 */
/* see stx_cuda_attention; from 4 on they differ from 2 in bf16 only */
static const int versions[] = {1, 3, 2, 4, 5, 6};

static size_t versions_of(int half) {
    return half ? 6 : 3;
}

/* which: bits of the versions to run */
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
    /* the learned span */
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
    /* keys that do not exist, zero keys */
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
    /* without causality */
    {.B = 2, .T = 33, .S = 20, .H = 2, .D = 16, .not_causal = 1},
    {.B = 1, .T = 20, .S = 70, .H = 2, .D = 16, .not_causal = 1, .first = 9, .u = 1, .drop = 0.4},
    {.B = 1, .T = 65, .S = 65, .H = 1, .D = 32, .not_causal = 1, .N = 4},
    /* persistent vectors */
    {.B = 2, .T = 16, .S = 32, .H = 2, .D = 16, .N = 1, .P = 32, .shared = 1},
    {.B = 1, .T = 33, .S = 64, .H = 2, .D = 16, .N = 5, .P = 64, .u = 1, .vb = 1},
    {.B = 1, .T = 33, .S = 64, .H = 2, .D = 32, .N = 64, .z = 1, .L = 50},
    {.B = 2, .T = 40, .S = 40, .H = 2, .D = 16, .N = 70, .dmin = 1, .drop = 0.3},
    /* dropout, strides, activations, sizes of logits */
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
    /* 65 to 96 channels and 97 to 128, in bf16 kernels of their own */
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
    /* longer ones */
    {.B = 1, .T = 129, .S = 400, .H = 2, .D = 64, .P = 300, .shared = 1, .dmin = 1, .z = 3,
     .L = 290},
    /* the mask outside the normaliser, one span for all heads, ramps that are not
       whole */
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
    /* padded keys, by the fused kernels: whole tiles, holes, the ends */
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
    /* without causality: fewer keys than queries and more, a hole, the end of the keys
       within a tile */
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

/* >>sides: keys and values before the block in memory of their own, of groups of
   heads, each as far back as its heads see; gradients that are written whatever was
   there. Against the CPU with all keys in one piece. What is in no group's memory
   is NaN where one piece has it, so that nothing may read it; so are gradients that
   are to be written. */
typedef struct sides {
    size_t count, rows[3], heads[3], ld[3], st[3], n[3];
    uint16_t head[256];
    /* keys and values; their gradients, as they begin and as they came out */
    float *v[3], *g[3];
    stx_real *dv[3], *dg[3];
} sides;

static stx_real *up(stx_ctx *x, const float *v, size_t n, int kind) {
    stx_real *p;
    if (stx_ctx_desc(x)->device == STX_CUDA) return cuda_numbers(x, v, n, kind);
    p = (stx_real *)malloc((n + 1) * sizeof *p);
    if (v) memcpy(p, v, n * sizeof *p);
    return p;
}

static void down(stx_ctx *x, float *v, stx_real *p, size_t n) {
    if (stx_ctx_desc(x)->device == STX_CUDA) {
        if (v) stx_cuda_download_activations(x, v, p, n);
        stx_cuda_free(x, p);
        return;
    }
    if (v) memcpy(v, p, n * sizeof *v);
    free(p);
}

/* Which group a head is in, and how much each keeps */
static void sides_open(const data *d, sides *s) {
    const stx_attention_args *a = &d->a;
    size_t h, g, D = a->D, need[256], set[256], map[3] = {0, 0, 0}, b, j, e, k;
    memset(s, 0, sizeof *s);
    for (h = 0; h < a->H; h++) {
        need[h] = d->c->past;
        if (d->c->sets > 1) {
            size_t r = stx_attention_reach((double)d->in[Z][h], (double)a->max_span,
                                           (double)a->ramp, a->span);
            if (r + 1 < need[h]) need[h] = r + 1;
        }
        if (d->c->sets < 3)
            set[h] = d->c->sets == 2 && need[h] * 2 <= d->c->past;
        else
            set[h] = need[h] * 3 > d->c->past * 2 ? 0 : need[h] * 3 > d->c->past ? 1 : 2;
        s->heads[set[h]]++;
    }
    for (g = 0; g < 3; g++)
        if (s->heads[g]) {
            map[g] = s->count;
            s->heads[s->count++] = s->heads[g];
        }
    for (g = 0; g < 3; g++) {
        s->rows[g] = 0;
        if (g >= s->count) s->heads[g] = 0;
    }
    memset(s->n, 0, sizeof s->n);
    for (h = 0; h < a->H; h++) {
        g = map[set[h]];
        s->head[h] = (uint16_t)(4 * s->n[g]++ + g);
        if (need[h] > s->rows[g]) s->rows[g] = need[h];
    }
    for (g = 0; g < s->count; g++) {
        s->ld[g] = 2 * s->heads[g] * D + (d->c->gap == 1 ? 3 : 8);
        s->st[g] = s->rows[g] * s->ld[g] + (d->c->gap == 1 ? 5 : 16);
        s->n[g] = a->B * s->st[g];
        s->v[g] = (float *)malloc(s->n[g] * sizeof(float));
        s->g[g] = (float *)malloc(s->n[g] * sizeof(float));
        for (e = 0; e < s->n[g]; e++) {
            s->v[g][e] = (float)NAN;
            s->g[g][e] = 77;
        }
    }
    for (b = 0; b < a->B; b++)
        for (j = 0; j < d->c->past; j++)
            for (h = 0; h < a->H; h++) {
                size_t row = d->c->past - j;
                g = s->head[h] & 3;
                if (row > s->rows[g]) continue;
                for (k = 0; k < 2; k++)
                    for (e = 0; e < D; e++) {
                        size_t at = b * s->st[g] + (s->rows[g] - row) * s->ld[g]
                                    + (k * s->heads[g] + (s->head[h] >> 2)) * D + e,
                               from = (k ? d->vo : d->ko) + b * a->kv_batch_stride
                                      + j * a->kv_row_stride + h * D + e;
                        s->v[g][at] = d->in[KV][from];
                        s->g[g][at] = d->c->fresh ? (float)NAN : d->start[KV][from];
                    }
            }
}

/* In x, all of it; version: of a GPU */
static void on_sides(stx_ctx *x, data *d, int version, float **out) {
    const int cuda = stx_ctx_desc(x)->device == STX_CUDA;
    const size_t C = d->a.H * d->a.D, past = d->c->past;
    stx_attention_args a;
    stx_real *in[INS], *grad[GRADS], *y, *top, *inv;
    float *host[INS], *start[GRADS];
    void *pad = NULL;
    sides s;
    size_t i, b, j, e, k, g, h, bytes;
    sides_open(d, &s);
    if (cuda) stx_cuda_attention(x, version);
    for (i = 0; i < INS; i++) {
        int stored = i == Q || i == KV || i == DY || (d->c->acts && i != Z);
        host[i] = (float *)malloc((d->size[i] + 1) * sizeof(float));
        memcpy(host[i], d->in[i], d->size[i] * sizeof(float));
        for (k = 0; i == KV && k < 2; k++)
            for (b = 0; b < d->a.B; b++)
                for (j = 0; j < past; j++)
                    for (e = 0; e < C; e++)
                        host[i][(k ? d->vo : d->ko) + b * d->a.kv_batch_stride
                                + j * d->a.kv_row_stride + e] = (float)NAN;
        in[i] = up(x, host[i], d->size[i], stored ? STX_MEM_ACTIVATIONS : STX_MEM_PARAMS);
    }
    for (i = 0; i < GRADS; i++) {
        int stored = i == Q || i == KV || (d->c->acts && i != Z);
        start[i] = (float *)malloc((d->size[i] + 1) * sizeof(float));
        memcpy(start[i], d->start[i], d->size[i] * sizeof(float));
        if (d->c->fresh && (i == Q || i == KV))
            for (e = 0; e < d->size[i]; e++)
                if (owned(d, OUT_GRADS + i, e)) start[i][e] = (float)NAN;
        for (k = 0; i == KV && k < 2; k++)
            for (b = 0; b < d->a.B; b++)
                for (j = 0; j < past; j++)
                    for (e = 0; e < C; e++)
                        start[i][(k ? d->vo : d->ko) + b * d->a.kv_batch_stride
                                 + j * d->a.kv_row_stride + e] = 55;
        grad[i] = up(x, start[i], d->size[i], stored ? STX_MEM_ACTIVATIONS : STX_MEM_BYTES);
    }
    y = up(x, NULL, d->size[DY], STX_MEM_ACTIVATIONS);
    top = up(x, NULL, d->rows, STX_MEM_BYTES);
    inv = up(x, NULL, d->rows, STX_MEM_BYTES);
    point(d, &a, in, grad, y, top, inv);
    offsets(d, x, &a);
    if (d->c->fresh) a.overwrite = STX_OVERWRITE_DQ | STX_OVERWRITE_DK | STX_OVERWRITE_DV;
    if (past) {
        a.cached_rows = past;
        a.groups = s.count;
        memcpy(a.head_place, s.head, sizeof a.head_place);
        a.k = skip(x, a.k, past * a.kv_row_stride);
        a.v = skip(x, a.v, past * a.kv_row_stride);
        a.dk = skip(x, a.dk, past * a.kv_row_stride);
        a.dv = skip(x, a.dv, past * a.kv_row_stride);
        for (g = 0; g < s.count; g++) {
            stx_attention_kv *o = &a.cached[g];
            s.dv[g] = up(x, s.v[g], s.n[g], STX_MEM_ACTIVATIONS);
            s.dg[g] = up(x, s.g[g], s.n[g], STX_MEM_ACTIVATIONS);
            o->k = s.dv[g];
            o->v = skip(x, s.dv[g], s.heads[g] * a.D);
            o->dk = s.dg[g];
            o->dv = skip(x, s.dg[g], s.heads[g] * a.D);
            o->rows = s.rows[g];
            o->row_stride = s.ld[g];
            o->batch_stride = s.st[g];
            if (d->c->fresh) a.overwrite |= STX_OVERWRITE_CACHED << g;
        }
    }
    if (d->pad)
        a.pad = cuda
                    ? (const int32_t *)(pad = cuda_bytes(x, d->pad,
                                                         a.B * a.pad_batch_stride * sizeof *d->pad))
                    : d->pad;
    for (i = 0; i < 2; i++) {
        bytes = (cuda ? stx_attention_work_cuda : stx_attention_work)(x, &a, (int)i);
        a.work = cuda ? cuda_bytes(x, NULL, bytes) : malloc(bytes + 1);
        if (cuda)
            (i ? stx_attention_bwd_cuda : stx_attention_fwd_cuda)(x, &a);
        else
            (i ? stx_attention_bwd : stx_attention_fwd)(x, &a);
        if (cuda)
            stx_cuda_free(x, a.work);
        else
            free(a.work);
        a.work = NULL;
    }
    CHECK(stx_ok(x), "sides, version %d: %s: %s", version, label(d->c), stx_error(x));
    down(x, out[OUT_Y], y, d->size[DY]);
    down(x, out[OUT_TOP], top, d->rows);
    down(x, out[OUT_INV], inv, d->rows);
    for (i = 0; i < GRADS; i++)
        down(x, d->size[i] ? out[OUT_GRADS + i] : NULL, grad[i], d->size[i]);
    for (i = 0; i < INS; i++) {
        down(x, NULL, in[i], 0);
        free(host[i]);
    }
    if (pad) stx_cuda_free(x, pad);
    for (g = 0; past && g < s.count; g++) {
        size_t wrong = 0;
        float *was = s.g[g];
        s.g[g] = (float *)malloc(s.n[g] * sizeof(float));
        down(x, s.g[g], s.dg[g], s.n[g]);
        down(x, NULL, s.dv[g], 0);
        for (e = 0; e < s.n[g]; e++)
            if (was[e] == 77) wrong += s.g[g][e] != 77;
        CHECK(!wrong, "sides: %zu numbers between the rows of group %zu were written: %s", wrong, g,
              label(d->c));
        free(was);
    }
    /* into one piece again */
    for (b = 0, bytes = 0; b < d->a.B * past * C * 2; b++) {
        const size_t c = b % C, of = b / C / 2 % past, t = b / C / 2 / past, row = past - of;
        h = c / d->a.D;
        k = b / C % 2;
        e = c % d->a.D;
        g = s.head[h] & 3;
        j = (k ? d->vo : d->ko) + t * d->a.kv_batch_stride + of * d->a.kv_row_stride + c;
        bytes += out[OUT_GRADS + KV][j] != 55;
        out[OUT_GRADS + KV][j] = row > s.rows[g]
                                     ? d->start[KV][j]
                                     : s.g[g][t * s.st[g] + (s.rows[g] - row) * s.ld[g]
                                              + (k * s.heads[g] + (s.head[h] >> 2)) * d->a.D + e];
    }
    CHECK(!bytes, "sides: %zu numbers were written where the past does not stand: %s", bytes,
          label(d->c));
    for (i = 0; i < GRADS; i++) free(start[i]);
    for (g = 0; g < s.count; g++) {
        free(s.v[g]);
        free(s.g[g]);
    }
}

static const attn sides_table[] = {
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

static void sides_all(int half) {
    size_t i, v, o, k;
    for (i = 0; i < sizeof sides_table / sizeof *sides_table; i++) {
        data d;
        float **got;
        data_open(&d, &sides_table[i], half, !sides_table[i].fresh);
        got = outputs(&d);
        on_cpu(cpu, &d);
        on_sides(cpu, &d, 0, got);
        /* the CPU: to the bit, but for the sign of 0 */
        if (d.a.T > 3 || d.a.drop > 0)
            for (o = 0; o < OUTS; o++) {
                size_t wrong = 0;
                for (k = 0; k < d.out_size[o]; k++)
                    wrong += !(got[o][k] == d.want[o][k]) && (o < OUT_GRADS || owned(&d, o, k));
                CHECK(!wrong, "sides: %zu numbers of %s differ on the CPU: %s", wrong, out_name[o],
                      label(d.c));
            }
        compare(&d, got, 0, 0, 0);
        for (v = 0; v < versions_of(half); v++) {
            on_sides(gpu[half], &d, versions[v], got);
            compare(&d, got, half, versions[v], 0);
        }
        outputs_free(got);
        data_close(&d);
    }
}

/* >>dropout
   Values are unit vectors, so that y holds the weights themselves: those that are 0 must
   be the CPU's, cell by cell. A replayed step's shift is as another stream. */
static void masks(int half) {
    static const attn cases[] = {
        {.B = 2, .T = 20, .S = 33, .H = 2, .D = 64, .drop = 0.5},
        {.B = 1, .T = 33, .S = 40, .H = 2, .D = 64, .drop = 0.3, .span = 19, .dmin = 1, .P = 25},
        {.B = 1, .T = 17, .S = 30, .H = 1, .D = 64, .drop = 0.7, .first = -11, .N = 9, .P = 60},
        {.B = 1, .T = 20, .S = 50, .H = 1, .D = 64, .drop = 0.4, .not_causal = 1, .first = 3},
        {.B = 2, .T = 50, .S = 37, .H = 1, .D = 64, .drop = 0.4, .not_causal = 1, .pad = 1},
        {.B = 2, .T = 33, .S = 60, .H = 1, .D = 64, .drop = 0.5, .pad = 7, .P = 60, .span = 41},
    };
    size_t k, v, i, j, b, h;
    for (k = 0; k < sizeof cases / sizeof *cases; k++)
        for (v = 0; v < versions_of(half); v++) {
            data d;
            float **got;
            long wrong = 0, zeros = 0;
            uint64_t shift = v ? (uint64_t)3 << 24 : 0;
            data_open(&d, cases + k, half, 0);
            for (b = 0; b < d.a.B; b++)
                for (j = 0; j < d.a.S; j++)
                    for (h = 0; h < d.a.H; h++)
                        for (i = 0; i < d.a.D; i++)
                            d.in[KV][d.vo + b * d.a.kv_batch_stride + j * d.a.kv_row_stride
                                     + h * d.a.D + i] = i == j ? 1.0f : 0.0f;
            for (h = 0; h < d.a.H; h++)
                for (j = 0; j < d.a.N; j++)
                    for (i = 0; i < d.a.D; i++)
                        d.in[PV][(h * d.a.N + j) * d.a.D + i] = i == d.a.S + j ? 1.0f : 0.0f;
            got = outputs(&d);
            d.a.stream += shift;
            on_cpu(cpu, &d);
            d.a.stream -= shift;
            stx_cuda_rng_shift(gpu[half], shift);
            on_gpu(gpu[half], &d, versions[v], 0, got);
            stx_cuda_rng_shift(gpu[half], 0);
            for (i = 0; i < d.size[DY]; i++) {
                if ((got[OUT_Y][i] == 0) != (d.want[OUT_Y][i] == 0)) wrong++;
                zeros += got[OUT_Y][i] == 0;
            }
            CHECK(!wrong && zeros > 0 && zeros < (long)d.size[DY],
                  "version %d: %ld of %zu weights are dropped that should not be, or the "
                  "other way round: %s",
                  versions[v], wrong, d.size[DY], label(cases + k));
            compare(&d, got, half, versions[v], 0);
            outputs_free(got);
            data_close(&d);
        }
}

/* The fused kernels take padded keys and calls without causality: their scratch is not
   version 0's. */
static void served(int half) {
    static const attn cases[] = {
        {.B = 2, .T = 40, .S = 90, .H = 2, .D = 64, .P = 90, .z = 1, .L = 80, .R = 8, .u = 1,
         .vb = 1, .N = 3, .drop = 0.1, .pad = 1},
        {.B = 1, .T = 90, .S = 40, .H = 2, .D = 128, .not_causal = 1},
        {.B = 2, .T = 33, .S = 40, .H = 2, .D = 32, .not_causal = 1, .pad = 2, .first = 3},
        {.B = 2,
         .T = 33,
         .S = 40,
         .H = 2,
         .D = 32,
         .pad = 2,
         .first = -3}, /* and one that they do not take */
    };
    size_t k, i;
    int backward;
    for (k = 0; k < 4; k++) {
        data d;
        stx_attention_args a;
        stx_real *in[INS], *grad[GRADS] = {NULL}, *y;
        data_open(&d, cases + k, half, 0);
        for (i = 0; i < INS; i++)
            in[i] = cuda_numbers(gpu[half], d.in[i], d.size[i],
                                 i == Q || i == KV || i == DY ? STX_MEM_ACTIVATIONS
                                                              : STX_MEM_PARAMS);
        y = cuda_numbers(gpu[half], NULL, d.size[DY], STX_MEM_ACTIVATIONS);
        grad[Q] = y; /* only asked for */
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
                  "%s: scratch of %zu, version 0 has %zu: %s", backward ? "backward" : "forward",
                  fused, plain, label(cases + k));
        }
        for (i = 0; i < INS; i++) stx_cuda_free(gpu[half], in[i]);
        stx_cuda_free(gpu[half], y);
        data_close(&d);
    }
}

/* >>what must not be seen Keys before first_key hold NaN; keys beyond the reach of
   every head, and later keys, and later queries, change: no bit of what does not see
   them may. */
static void unseen(int half) {
    static const attn cases[] = {
        {.B = 2, .T = 40, .S = 90, .H = 2, .D = 16, .P = 90, .shared = 1, .dmin = 1, .z = 2,
         .L = 100, .R = 8},
        {.B = 1, .T = 65, .S = 70, .H = 2, .D = 32, .P = 70, .u = 1, .vb = 1, .N = 3},
        {.B = 1, .T = 70, .S = 140, .H = 1, .D = 16, .span = 17, .first = 30, .drop = 0.2},
    };
    size_t k, v, b, j, e, i;
    for (k = 0; k < 3; k++)
        for (v = 0; v < versions_of(half); v++) {
            const attn *c = cases + k;
            data d;
            float **first, **got;
            /* z 2: 0.06 L + R + 1 at most */
            size_t cut = c->T / 2 + 3, C = c->H * c->D, reach = k == 0 ? 15 : k == 2 ? 17 : c->S;
            /* keys that no query reaches */
            size_t dead = c->S - c->T > reach ? c->S - c->T - reach : 0;
            int good = 1;
            data_open(&d, c, half, 0);
            for (b = 0; b < c->B; b++)
                for (j = 0; (ptrdiff_t)j < c->first; j++)
                    for (e = 0; e < C; e++)
                        d.in[KV][d.ko + b * d.a.kv_batch_stride + j * d.a.kv_row_stride + e] =
                            d.in[KV][d.vo + b * d.a.kv_batch_stride + j * d.a.kv_row_stride + e] =
                                (float)NAN;
            first = outputs(&d);
            got = outputs(&d);
            on_gpu(gpu[half], &d, versions[v], FORWARD_ONLY, first);
            on_cpu(cpu, &d);
            compare(&d, first, half, versions[v], 1);
            for (b = 0; b < c->B; b++)
                for (j = 0; j < c->S; j++)
                    for (e = 0; e < C; e++) {
                        /* delta < dmin for every query before cut */
                        int later = j + c->T >= c->S + cut + 1 - (size_t)c->dmin;
                        if ((j >= (size_t)STX_MAX(c->first, 0) && j < dead) || later) {
                            d.in[KV][d.ko + b * d.a.kv_batch_stride + j * d.a.kv_row_stride + e] =
                                50;
                            d.in[KV][d.vo + b * d.a.kv_batch_stride + j * d.a.kv_row_stride + e] =
                                -70;
                        }
                    }
            for (b = 0; b < c->B; b++)
                for (j = cut; j < c->T; j++)
                    for (e = 0; e < C; e++)
                        d.in[Q][d.qo + b * d.a.q_batch_stride + j * d.a.q_row_stride + e] = 20;
            on_gpu(gpu[half], &d, versions[v], FORWARD_ONLY, got);
            for (b = 0; b < c->B; b++)
                for (i = 0; i < cut; i++)
                    if (memcmp(first[OUT_Y] + (b * c->T + i) * C, got[OUT_Y] + (b * c->T + i) * C,
                               C * sizeof(float)))
                        good = 0;
            CHECK(good, "version %d: a query sees what it must not: %s", versions[v], label(c));
            for (good = 0, i = cut; i < c->T; i++)
                if (memcmp(first[OUT_Y] + i * C, got[OUT_Y] + i * C, C * sizeof(float))) good++;
            CHECK(good == (int)(c->T - cut), "version %d: later queries see no change: %s",
                  versions[v], label(c));
            outputs_free(first);
            outputs_free(got);
            data_close(&d);
        }
}

/* >>gradients that are not wanted: the others keep their bits, and those not wanted
   are not touched */
static void wanted(int half) {
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
                    /* without dv: the buffer's first half, dk */
                    size_t n = w == GRADS && o == OUT_GRADS + KV ? d.vo : d.out_size[o];
                    if (o != OUT_GRADS + w && memcmp(all[o], got[o], n * sizeof(float))) good = 0;
                }
                if (w == GRADS)
                    for (o = d.vo; o < d.size[KV]; o++)
                        if (got[OUT_GRADS + KV][o] != d.start[KV][o]) good = 0;
                CHECK(good, "version %d without %s: others change: %s", versions[v],
                      w < GRADS ? out_name[OUT_GRADS + w] : "dv", label(cases + k));
            }
            outputs_free(all);
            outputs_free(got);
            data_close(&d);
        }
}

/* >>repeatability */
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

/* The number of multiprocessors decides nothing: GPUs with more or fewer of them give
   the same bits. A memory that fills: the first key there is cuts off windows of up to
   100 keys, in which the two kinds of tiles begin at different keys and so sum in
   another order. */
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
        {.B = 33,
         .T = 128,
         .S = 188,
         .H = 8,
         .D = 8,
         .z = 1,
         .L = 90,
         .R = 9}, /* 264, as many as the wide tiles want */
    };
    static const int sms[] = {4, 132, 400};
    size_t k, n;
    for (k = 0; k < (half ? 3 : 1); k++) {
        data d;
        uint64_t narrow, wide;
        data_open(&d, cases + k, half, 0);
        d.a.span = 600; /* of the model; the memory is not that long yet */
        wide = bits_of(gpu[half], &d, 4);
        narrow = bits_of(gpu[half], &d, 2);
        CHECK(k == 2 ? narrow == wide : (narrow == wide) == !half,
              "case %d: tiles of 64 and of 128 queries give %s bits", (int)k,
              narrow == wide ? "the same" : "other");
        for (n = 0; n < 3; n++) {
            stx_ctx *x;
#ifdef SEQTX_CUDA_HOST
            cuda_host_sms(sms[n]);
#endif
            x = cuda_ctx(STX_CUDA, half ? STX_PREC_BF16 : STX_PREC_F32);
            CHECK(bits_of(x, &d, 2) == narrow, "%s, case %d: other bits with %d multiprocessors",
                  half ? "bf16" : "float", (int)k, sms[n]);
            stx_destroy(x);
        }
        data_close(&d);
    }
#ifdef SEQTX_CUDA_HOST
    cuda_host_sms(4);
#endif
}

#ifdef SEQTX_CUDA_HOST
/* Backward fetches the next tile while it works on one where shared memory is enough
   for that, which the GPU decides: the bits must not know. Kernels of few registers
   leave so many blocks to a multiprocessor that there is no memory for it, those of
   very many always do. */
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
            bytes[n] = cuda_host_shared_asked();
            again_run(&g, bits + n);
            bytes[n] = cuda_host_shared_asked() - bytes[n];
        }
        cuda_host_registers(255);
        CHECK(bits[0] == bits[1], "%s: other bits with the next tile in shared memory: %s",
              half ? "bf16" : "float", label(cases + k));
        CHECK(bytes[0] < bytes[1],
              "%s: %zu and %zu bytes of shared memory: both times the same: %s",
              half ? "bf16" : "float", bytes[0], bytes[1], label(cases + k));
        data_close(&d);
    }
}

/* bench/cuda_model.h counts what the kernels execute: as many products of tensor cores
   as the shim sees, to the last one */
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
    static const int of[] = {2, 4, 5, 6}; /* 6: room for half a head */
    size_t k, v;
    int backward;
    for (k = 0; k < sizeof cases / sizeof *cases; k++)
        for (v = 0; v < 4; v++) {
            const attn *c = cases + k;
            const int wide = of[v] == 4;
            data d;
            float **got;
            long ran[2];
            config g;
            memset(&g, 0, sizeof g);
            g.dim = c->D;
            g.heads = 1;
            g.block = c->T;
            g.batch = c->B;
            data_open(&d, c, 1, 0);
            got = outputs(&d);
            ran[0] = cuda_host_products();
            on_gpu(gpu[1], &d, of[v], FORWARD_ONLY, got);
            ran[0] = cuda_host_products() - ran[0];
            ran[1] = cuda_host_products();
            on_gpu(gpu[1], &d, of[v], 0, got);
            ran[1] = cuda_host_products() - ran[1] - ran[0];
            for (backward = 0; backward < 2; backward++) {
                tiles t = tiles_of(&g, (double)(c->S - c->T), (double)d.a.span,
                                   wide && !backward && c->D <= 64);
                double want;
                int rows;
                t.lo = (double)c->first;
                if (d.size[Z]) {
                    t.live = ceil((double)d.in[Z][0] * (double)d.a.max_span + (double)d.a.ramp + 1)
                             - 1;
                    t.full = floor((double)d.in[Z][0] * (double)d.a.max_span) + 1;
                }
                rows = v < 2
                       || (v == 3
                           && tiles_width(&t, t.live) <= floor(tiles_width(&t, t.span) / 32) * 16);
                want = tiles_vectors(&t, (double)c->N, backward)
                       + (backward ? tiles_queries(&t) + tiles_keys(&t)
                                         + (rows ? tiles_table(&t) : tiles_diagonals(&t))
                                   : tiles_forward(&t));
                /* of 16 queries, 8 keys, 16 channels */
                want *= (double)c->B * t.BK / 8 * t.DP / 16;
                CHECK((double)ran[backward] == want,
                      "%s of version %d: %ld products, counted %.0f: live %.0f, %s",
                      backward ? "backward" : "forward", of[v], ran[backward], want, t.live,
                      label(c));
            }
            outputs_free(got);
            data_close(&d);
        }
    for (k = 0; k < CONFIGS; k++) { /* heads by groups: as the library cuts them */
        const config *g = &configs[k];
        size_t l, h, i;
        for (l = 0; l < g->layers; l++) {
            stx_head_groups of_it;
            size_t need[256], n[3] = {0, 0, 0};
            double have[3], heads[3];
            int groups = groups_of(g, l, have, heads), same;
            for (h = 0; h < g->heads; h++) need[h] = (size_t)keys_of(g, l, h) + 1;
            stx_head_groups_choose(need, g->heads, (size_t)window_of(g, l), &of_it);
            for (h = 0; h < g->heads; h++) n[of_it.of[h]]++;
            for (i = 0, same = of_it.count == (size_t)groups; same && i < of_it.count; i++)
                same = have[i] == (double)of_it.rows[i] && heads[i] == (double)n[i];
            CHECK(same, "%s, layer %zu: the model counts other groups of heads", g->name, l);
        }
    }
    { /* and as a model with few streams does, for which groups do not pay: their weights' order costs more */
        size_t B, l, h, i, cut[4] = {0, 0, 0, 0};
        config c = configs[2];
        stx_span_desc d;
        stx_desc cd;
        stx_ctx *x;
        stx_span *m;
        memset(&cd, 0, sizeof cd);
        memset(&d, 0, sizeof d);
        c.layers = 3;
        c.dim = c.inner = 320;
        cd.threads = 1;
        d.vocab = 2;
        d.layers = 3;
        d.dim = d.inner = c.dim;
        d.heads = c.heads;
        d.span = c.span;
        d.adapt_span = 1;
        x = stx_create(&cd);
        m = stx_span_create(x, &d);
        CHECK(m && d.heads == 8, "%s", stx_error(x));
        for (l = 0; l < 3; l++)
            for (h = 0; h < c.heads; h++)
                m->layer[l].z->data[h] = (stx_real)(span_of(&c, l, h) / (double)c.span);
        for (B = 1; B < 9; B++)
            for (l = 0; l < 3; l++) {
                stx_head_groups of_it;
                size_t n[3] = {0, 0, 0};
                double have[3], heads[3];
                int groups, same;
                c.batch = B;
                groups = groups_of(&c, l, have, heads);
                CHECK((double)stx_span_window(m, l) == window_of(&c, l),
                      "layer %zu: a window of %zu", l, stx_span_window(m, l));
                inner_span_groups(m, l, B, stx_span_window(m, l), 0, &of_it);
                for (h = 0; h < c.heads; h++) n[of_it.of[h]]++;
                for (i = 0, same = of_it.count == (size_t)groups; same && i < of_it.count; i++)
                    same = have[i] == (double)of_it.rows[i] && heads[i] == (double)n[i];
                CHECK(same, "%zu streams, layer %zu: %zu groups of heads, the model counts %d", B,
                      l, of_it.count, groups);
                cut[of_it.count]++;
            }
        CHECK(cut[1] && cut[2] + cut[3], "%zu without groups, %zu with two, %zu with three", cut[1],
              cut[2], cut[3]);
        stx_destroy(x);
    }
}
#endif

/* ROWS OF dR. The gradient of the relative table from rows in memory is that of the
   sweep of diagonals but for the order of its sums: the terms are the same bfloat16s.
   All else has the same bits; what was not written is NaN here, and must not be read. */
static void rows(void) {
    static const attn cases[] = {
        {.B = 2, .T = 130, .S = 430, .H = 3, .D = 64, .P = 300, .shared = 1, .dmin = 1, .z = 1,
         .L = 290},
        {.B = 3, .T = 90, .S = 390, .H = 2, .D = 32, .P = 300, .shared = 1, .dmin = 1, .z = 3,
         .L = 290, .R = 20, .N = 3, .drop = 0.2},
        {.B = 2,
         .T = 100,
         .S = 170,
         .H = 2,
         .D = 32,
         .P = 180,
         .first = 61,
         .vb = 1}, /* a memory that fills */
        /* no memory */
        {.B = 2, .T = 75, .S = 75, .H = 2, .D = 16, .P = 75, .u = 1, .vb = 1, .gap = 2},
        {.B = 1, .T = 33, .S = 150, .H = 2, .D = 72, .P = 150, .dmin = 1, .z = 3, .L = 120, .R = 8,
         .u = 1},
        {.B = 1, .T = 70, .S = 131, .H = 1, .D = 128, .P = 131, .vb = 1, .acts = 1},
        {.B = 2, .T = 130, .S = 330, .H = 2, .D = 96, .P = 200, .dmin = 1, .z = 1, .L = 180,
         .vb = 1},
        {.B = 1,
         .T = 70,
         .S = 100,
         .H = 2,
         .D = 16,
         .P = 100,
         .first = 95,
         .dmin = 1}, /* strips that see nothing */
        /* none does */
        {.B = 1, .T = 40, .S = 40, .H = 2, .D = 16, .P = 40, .first = 40, .shared = 1},
        {.B = 1,
         .T = 70,
         .S = 100,
         .H = 2,
         .D = 16,
         .P = 99,
         .first = 50,
         .dmin = 1}, /* newest is 16 more than C - dmin, and strip 0
                                                                                                 sees
                                                                                                 nothing:
                                                                                                 nearly
                                                                                                 */
        /* blocks with the end of a head, and the next */
        {.B = 200, .T = 3, .S = 9, .H = 3, .D = 8, .P = 9, .shared = 1},
        {.B = 90, .T = 17, .S = 20, .H = 4, .D = 8, .P = 20, .vb = 1, .dmin = 1},
        {.B = 2, .T = 70, .S = 140, .H = 2, .D = 16, .P = 30, .span = 9, .shared = 1},
        {.B = 1, .T = 81, .S = 300, .H = 1, .D = 24, .P = 17, .loose = 1, .u = 1, .vb = 1},
        {.B = 1, .T = 1, .S = 77, .H = 4, .D = 64, .P = 77, .shared = 1, .z = 5, .L = 50},
    };
    static const int of[] = {5, 2, 6};
    size_t k, v, o, i;
#ifdef SEQTX_CUDA_HOST
    long ran[3];
#endif
    for (k = 0; k < sizeof cases / sizeof *cases; k++) {
        data d;
        float **out[3];
        double top = 0, off;
        data_open(&d, cases + k, 1, 1);
        for (v = 0; v < 3; v++) {
            /* in whose scratch nothing was written yet */
            stx_ctx *x = cuda_ctx(STX_CUDA, STX_PREC_BF16);
            out[v] = outputs(&d);
#ifdef SEQTX_CUDA_HOST
            ran[v] = cuda_host_products();
#endif
            on_gpu(x, &d, of[v], 0, out[v]);
            stx_destroy(x);
#ifdef SEQTX_CUDA_HOST
            ran[v] = cuda_host_products() - ran[v];
#endif
            for (o = 0; o < OUTS && v; o++) {
                if (o == OUT_GRADS + PE) continue;
                CHECK(!memcmp(out[0][o], out[v][o], d.out_size[o] * sizeof(float)),
                      "version %d: other bits of %s than without rows of "
                      "dR: %s",
                      of[v], out_name[o], label(d.c));
            }
            for (i = 0; i < d.size[PE]; i++)
                top = STX_MAX(top, fabs((double)out[0][OUT_GRADS + PE][i]));
            for (i = 0, off = 0; i < d.size[PE]; i++) {
                double e = fabs((double)out[v][OUT_GRADS + PE][i]
                                - (double)out[0][OUT_GRADS + PE][i])
                           / top;
                if (!(e <= 1e300))
                    off = HUGE_VAL;
                else if (e > off)
                    off = e;
            }
            CHECK(off <= (d.c->acts ? 4e-3 : 2e-6),
                  "version %d: dpe off by %.2e from the sweep's: %s", of[v], off, label(d.c));
        }
#ifdef SEQTX_CUDA_HOST
        /* fewer, but where windows are short: there the sweep takes what groups of
           keys they meet, the rows' product whole blocks of columns */
        CHECK(k < 7 || k == 13 ? ran[1] < ran[0] : k == 8 || ran[1] != ran[0],
              "%ld products with rows of dR, %ld without: %s", ran[1], ran[0], label(d.c));
        CHECK(k > 1 || (ran[1] < ran[2] && ran[2] < ran[0]),
              "%ld products with room for half of the rows, %ld and %ld for all and none: "
              "%s",
              ran[2], ran[1], ran[0], label(d.c));
#endif
        for (v = 0; v < 3; v++) outputs_free(out[v]);
        data_close(&d);
    }
}

/* Edges: windows that end in every group of 16 keys of a tile and beside it, from any
   first key and to any last query, with positions and persistent vectors. A group too
   few of those that a strip of queries meets is a wrong number here, one too many is
   counted below. */
static void edges(int half) {
    static const size_t spans[] = {3, 8, 15, 16, 17, 31, 33, 48, 49, 63, 64, 65, 80, 97, 129},
                        sizes[] = {16, 64, 96, 128};
    static const ptrdiff_t firsts[] = {0, 5, 40, 79};
    size_t k, n;
    test_state = 7001;
    for (k = 0; k < sizeof spans / sizeof *spans; k++)
        for (n = 0; n < 4; n++) {
            attn c;
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
            /* 3: dz of one head alone may be what rounding leaves */
            if (n == 3) {
                c.H = 3;
                c.z = 1;
                c.L = (double)spans[k];
                c.R = 9;
            }
            one_case(&c, half, 0, half ? 4 + 8 + 16 : 4);
        }
}

/* The op, whose pad is on the device where the kernel is, in a step that trains */
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
    CHECK(k, "%s: gradients of the padded op", half ? "bf16" : "float");
    for (n = 0; n < 3; n++) free(in[n]);
    free(dy);
}

/* TF32: 11 digits, between the others. With a mask its sweep of queries is f32's for
   some head sizes. */
static void tf32(void) {
    static const attn cases[] = {
        {.B = 2, .T = 33, .S = 70, .H = 2, .D = 72, .P = 70, .u = 1, .z = 1, .L = 60, .R = 8},
        {.B = 2, .T = 33, .S = 70, .H = 2, .D = 72, .P = 70, .u = 1, .z = 1, .L = 60, .R = 8,
         .N = 3, .pad = 1},
        {.B = 2, .T = 33, .S = 70, .H = 2, .D = 32, .P = 70, .pad = 5, .drop = 0.2},
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

static void refused(void) {
    stx_attention_args a;
    memset(&a, 0, sizeof a);
    a.B = a.T = a.S = a.D = 1;
    a.H = 257;
    CHECK(stx_attention_work_cuda(gpu[0], &a, 0) == 0, "work for 257 heads");
    stx_attention_fwd_cuda(gpu[0], &a);
    CHECK(stx_error_code(gpu[0]) == STX_ERR_SHAPE
              && strstr(stx_error(gpu[0]), "stx_attention_fwd: heads: expected at most 256, got "
                                           "257"),
          "%s", stx_error(gpu[0]));
    stx_clear_error(gpu[0]);
    stx_attention_bwd_cuda(gpu[0], &a);
    CHECK(stx_error_code(gpu[0]) == STX_ERR_SHAPE
              && strstr(stx_error(gpu[0]), "stx_attention_bwd: heads: expected at most 256, got "
                                           "257"),
          "%s", stx_error(gpu[0]));
    stx_clear_error(gpu[0]);
    a.H = 2;
    a.T = 0;
    CHECK(stx_attention_work_cuda(gpu[0], &a, 1) == 0, "work for no query");
    stx_attention_fwd_cuda(gpu[0], &a);
    stx_attention_bwd_cuda(gpu[0], &a);
    CHECK(stx_ok(gpu[0]), "%s", stx_error(gpu[0]));
    a.B = 64;
    a.T = 1024;
    a.S = 9216;
    a.H = 8;
    a.D = 64;
    a.P = 8192;
    a.pe_heads = 1;
    a.span = 8192;
    a.delta_min = 1;
    a.N = 0;
    a.dpe = a.dk = a.dv = (stx_real *)&a;
    stx_cuda_attention(gpu[0], 1);
    CHECK(stx_attention_work_cuda(gpu[0], &a, 0) < (size_t)280 << 20
              && stx_attention_work_cuda(gpu[0], &a, 1) < (size_t)280 << 20,
          "version 0's scratch is bounded: %zu, %zu", stx_attention_work_cuda(gpu[0], &a, 0),
          stx_attention_work_cuda(gpu[0], &a, 1));
    { /* backward's tiles of 32 queries are too many to be counted in an int, forward's of 64 are not: version 0 has the gradients */
        size_t fused, plain;
        memset(&a, 0, sizeof a);
        a.B = 64;
        a.H = 256;
        a.D = 72;
        a.T = a.S = a.span = (size_t)1 << 22;
        a.scale = 1;
        a.dq = (stx_real *)&a;
        plain = stx_attention_work_cuda(gpu[0], &a, 1);
        stx_cuda_attention(gpu[0], 0);
        fused = stx_attention_work_cuda(gpu[0], &a, 1);
        CHECK(fused == plain, "2^31 tiles: scratch of %zu, version 0's is %zu", fused, plain);
        a.T -= 32;
        fused = stx_attention_work_cuda(gpu[0], &a, 1);
        CHECK(fused >= a.B * a.H * a.T * 4,
              "2^31 - 2^14 tiles: scratch of %zu is not the fused kernels'", fused);
    }
}

#ifdef SEQTX_CUDA_HOST
/* For tests/cuda_regs.sh --table: name, channels, threads, dynamic shared memory, and
   more with the next tile, a line a kernel */
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
int main(int argc, char **argv) {
    /* one section; short, for sanitizers: the table of cases, each by one version in
       float and by one in bfloat16 */
    int half, brief = argc > 1 && !strcmp(argv[1], "short"),
              only = argc < 2 ? -1
                     : brief  ? 0
                              : atoi(argv[1]);
    size_t i;
    cpu = cuda_ctx(STX_CPU, STX_PREC_F32);
    gpu[0] = cuda_ctx(STX_CUDA, STX_PREC_F32);
    gpu[1] = cuda_ctx(STX_CUDA, STX_PREC_BF16);
    for (half = 0; half < 2; half++)
        if (!stx_ok(gpu[half])) {
            printf("%s\n", stx_error(gpu[half]));
            return 1;
        }
#ifdef SEQTX_CUDA_HOST
    if (argc > 1 && !strcmp(argv[1], "kernels")) {
        kernels();
        return 0;
    }
#endif
    for (half = 0; half < 2; half++) {
        test_state = 20250;
        if (only < 0 || only == 0)
            for (i = 0; i < TABLE; i++)
                one_case(table + i, half, (int)(i % 3 == 1),
                         brief ? 1u << (i + (size_t)half) % versions_of(half) : 63);
        if (only < 0 || only == 1)
            for (i = 0; i < 60; i++) {
                attn c = random_case();
                if (i >= 40) c.pad = 1 + (int)(i % 4);
                /* a vector alone: its gradient is what rounding leaves of 0 */
                if (c.pad && c.N == 1) c.N = 2;
                /* version 0 with memory or without, the fused kernels */
                one_case(&c, half, (int)(i % 2),
                         (i / 2 + i / 4 + (size_t)half) % 2 ? 16 + 14 : 32 + 13);
            }
        padded_op(half);
        served(half);
        if (only < 0 || only == 11 || brief) sides_all(half);
        if (only < 0 || only == 2) masks(half);
        if (only < 0 || only == 3) unseen(half);
        if (only < 0 || only == 4) wanted(half);
        if (only < 0 || only == 5) orders(half);
        if (only < 0 || only == 6) devices(half);
        if (only < 0 || only == 11) edges(half);
#ifdef SEQTX_CUDA_HOST
        if (only < 0 || only == 8) ahead(half);
#endif
    }
    if (only < 0 || only == 7) tf32();
    if (only < 0 || only == 10 || brief) rows();
#ifdef SEQTX_CUDA_HOST
    if (only < 0 || only == 9) counted();
#endif
    refused();
    for (half = 0; half < 2; half++) {
        printf("%s: largest errors", half ? "bf16" : "float");
        for (i = 0; i < OUTS; i++) printf("%s %s %.1e", i ? "," : "", out_name[i], worst[half][i]);
        printf("\n");
    }
    stx_destroy(cpu);
    stx_destroy(gpu[0]);
    stx_destroy(gpu[1]);
    return cuda_test_end();
}
