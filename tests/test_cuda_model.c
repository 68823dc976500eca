/* The upper storey on a GPU: every op with its gradients against the CPU, whole models
   trained on both, steps replayed as graphs, checkpoints that move between devices,
   and what goes wrong. */
#if !defined(_WIN32) && !defined(_POSIX_C_SOURCE)
  #define _POSIX_C_SOURCE 200809L
#endif
#include "../seqtx_attn_span.h"
#include "inner.h"
#include "cuda_test.h"
#include <unistd.h>

/* >>helpers */

static const char *part = ""; /* argv[1]: only this one */

/* tensor t of x against host numbers */
static double off(stx_ctx *x, const stx_tensor *t, const stx_real *data, const float *want) {
    (void)t;
    return cuda_error(x, data, want, t->size, 1e-3);
}

static int32_t *ids_of(size_t n, size_t V, size_t salt) {
    int32_t *id = (int32_t *)malloc(n * sizeof *id);
    size_t i;
    for (i = 0; i < n; i++) id[i] = (int32_t)((i * i / 3 + 7 * i + 5 * salt + (i >> 3) * salt) % V);
    return id;
}

/* >>ops: the same chain on both devices, gradients of all inputs */

enum { MAX_IN = 6 };

typedef stx_tensor *(*op_fn)(stx_ctx *x, stx_tensor **in);

static stx_tensor *op_linear(stx_ctx *x, stx_tensor **in) {
    return stx_linear(x, in[0], in[1], in[2], STX_ACT_NONE);
}

static stx_tensor *op_linear_relu(stx_ctx *x, stx_tensor **in) {
    return stx_linear(x, in[0], in[1], in[2], STX_ACT_RELU);
}

static stx_tensor *op_linear_gelu(stx_ctx *x, stx_tensor **in) {
    return stx_linear(x, in[0], in[1], in[2], STX_ACT_GELU);
}

static stx_tensor *op_linear_tanh(stx_ctx *x, stx_tensor **in) {
    return stx_linear(x, in[0], in[1], in[2], STX_ACT_TANH);
}

static stx_tensor *op_matmul(stx_ctx *x, stx_tensor **in) {
    return stx_matmul(x, in[0], in[1], 0, 0);
}

static stx_tensor *op_matmul_t(stx_ctx *x, stx_tensor **in) {
    return stx_matmul(x, in[0], in[1], 1, 1);
}

static stx_tensor *op_layernorm(stx_ctx *x, stx_tensor **in) {
    return stx_layernorm(x, in[0], in[1], in[2], 0);
}

static stx_tensor *op_residual(stx_ctx *x, stx_tensor **in) {
    return stx_residual_norm(x, in[0], in[1], 0.2, in[2], in[3], 0);
}

static stx_tensor *op_add(stx_ctx *x, stx_tensor **in) {
    return stx_add(x, in[0], in[1]);
}

static stx_tensor *op_mul(stx_ctx *x, stx_tensor **in) {
    return stx_mul(x, in[0], in[1]);
}

static stx_tensor *op_scale(stx_ctx *x, stx_tensor **in) {
    return stx_scale(x, in[0], 0.7);
}

static stx_tensor *op_relu(stx_ctx *x, stx_tensor **in) {
    return stx_relu(x, in[0]);
}

static stx_tensor *op_gelu(stx_ctx *x, stx_tensor **in) {
    return stx_gelu(x, in[0]);
}

static stx_tensor *op_tanh(stx_ctx *x, stx_tensor **in) {
    return stx_tanh(x, in[0]);
}

static stx_tensor *op_sigmoid(stx_ctx *x, stx_tensor **in) {
    return stx_sigmoid(x, in[0]);
}

static stx_tensor *op_softmax(stx_ctx *x, stx_tensor **in) {
    return stx_softmax(x, in[0]);
}

static stx_tensor *op_dropout(stx_ctx *x, stx_tensor **in) {
    return stx_dropout(x, in[0], 0.3);
}

static stx_tensor *op_mean(stx_ctx *x, stx_tensor **in) {
    return stx_mean(x, in[0]);
}

static stx_tensor *op_mse(stx_ctx *x, stx_tensor **in) {
    return stx_mse(x, in[0], in[1]);
}

static stx_tensor *op_concat(stx_ctx *x, stx_tensor **in) {
    return stx_concat(x, in[0], in[1]);
}

static stx_tensor *op_slice(stx_ctx *x, stx_tensor **in) {
    return stx_slice(x, in[0], 1, 4);
}

static stx_tensor *op_channels(stx_ctx *x, stx_tensor **in) {
    return stx_concat_channels(x, in[0], in[1]);
}

static stx_tensor *op_reshape(stx_ctx *x, stx_tensor **in) {
    return stx_tanh(x, stx_reshape(x, stx_scale(x, in[0], 2), in[0]->size, 0, 0, 0));
}

static stx_tensor *op_detach(stx_ctx *x, stx_tensor **in) {
    return stx_mul(x, in[0], stx_detach(x, in[0]));
}

static stx_tensor *op_gather(stx_ctx *x, stx_tensor **in) {
    static const int32_t idx[7] = {3, 0, 3, 3, 1, 14, 0};
    return stx_gather(x, in[0], idx, 7);
}

static stx_tensor *op_embedding(stx_ctx *x, stx_tensor **in) {
    int32_t *id = ids_of(2 * 37, in[0]->dim[0], 3);
    stx_tensor *y = stx_embedding(x, in[0], stx_tokens(x, id, 2, 37));
    free(id);
    return y;
}

static stx_tensor *cross_entropy(stx_ctx *x, stx_tensor *in, int over) {
    int32_t *id = ids_of(in->dim[0] * in->dim[1], in->dim[2], 5);
    stx_ids *t = stx_tokens(x, id, in->dim[0], in->dim[1]);
    free(id);
    return over ? stx_cross_entropy_inplace(x, stx_scale(x, in, 1.5), t, 0)
                : stx_cross_entropy(x, in, t, 9);
}

static stx_tensor *op_cross_entropy(stx_ctx *x, stx_tensor **in) {
    return cross_entropy(x, in[0], 0);
}

static stx_tensor *op_cross_entropy_over(stx_ctx *x, stx_tensor **in) {
    return cross_entropy(x, in[0], 1);
}

/* 11 and 8 words of width 16 and 4; in: their tables, the projection of the second,
   the head's column for it, h */
static stx_adaptive adaptive(stx_tensor **in, int output) {
    stx_adaptive a;
    memset(&a, 0, sizeof a);
    a.clusters = 2;
    a.end[0] = 11;
    a.end[1] = 19;
    a.table[0] = in[0];
    a.table[1] = in[1];
    a.proj[1] = in[2];
    a.cluster_w = output ? in[3] : NULL;
    a.scale = 1;
    a.dropout = 0.3;
    return a;
}

static stx_tensor *op_cross_entropy_tokens(stx_ctx *x, stx_tensor **in) {
    int32_t *id = ids_of(15, 41, 5);
    stx_real w[15];
    stx_token_loss how;
    stx_tensor *y;
    int i;
    memset(&how, 0, sizeof how);
    for (i = 0; i < 15; i++) w[i] = (stx_real)(1 + i % 4) / 2;
    id[3] = id[7] = -1;
    how.ignore = how.mean = 1;
    how.ignored_id = -1;
    how.weights = stx_input(x, w, 15, 0, 0, 0);
    y = stx_cross_entropy_tokens(x, in[0], stx_tokens(x, id, 3, 5), &how);
    free(id);
    return y ? stx_concat_channels(x, y, stx_detach(x, how.nll)) : NULL;
}

static stx_tensor *op_adaptive_tokens(stx_ctx *x, stx_tensor **in) {
    stx_adaptive a;
    int32_t *id = ids_of(2 * 15, 19, 5);
    stx_token_loss how;
    stx_tensor *y;
    memset(&a, 0, sizeof a);
    memset(&how, 0, sizeof how);
    a.clusters = 2;
    a.end[0] = 11;
    a.end[1] = 19;
    a.table[0] = in[0];
    a.table[1] = in[1];
    a.proj[1] = in[2];
    a.cluster_w = in[3];
    a.proj_bias[1] = in[5];
    how.ignore = 1;
    how.ignored_id = 12;
    how.divisor = 20;
    y = stx_adaptive_softmax_tokens(x, &a, in[4], stx_tokens(x, id, 2, 15), &how);
    free(id);
    return y ? stx_concat_channels(x, y, stx_detach(x, how.nll)) : NULL;
}

static stx_tensor *op_adaptive_input(stx_ctx *x, stx_tensor **in) {
    stx_adaptive a = adaptive(in, 0);
    int32_t *id = ids_of(2 * 15, 19, 3);
    stx_tensor *y = stx_adaptive_input(x, &a, stx_tokens(x, id, 2, 15));
    free(id);
    return y;
}

static stx_tensor *op_adaptive_softmax(stx_ctx *x, stx_tensor **in) {
    stx_adaptive a = adaptive(in, 1);
    int32_t *id = ids_of(2 * 15, 19, 5);
    stx_tensor *y = stx_adaptive_softmax(x, &a, in[4], stx_tokens(x, id, 2, 15));
    free(id);
    return y;
}

static stx_tensor *twice(stx_ctx *x, void *user, stx_tensor **in, stx_tensor **out) {
    stx_tensor *a = stx_tanh(x, stx_mul(x, in[0], in[1]));
    if (!user) return stx_dropout(x, a, 0.25);
    /* the first result lies above the others, of which two share memory */
    out[0] = stx_slice(x, a, 1, 3);
    out[1] = in[1];
    out[2] = out[0];
    return stx_dropout(x, a, 0.25);
}

static stx_tensor *op_recompute(stx_ctx *x, stx_tensor **in) {
    return stx_add(x, stx_recompute(x, twice, NULL, in, 2, NULL, 0), in[0]);
}

static stx_tensor *op_results(stx_ctx *x, stx_tensor **in) {
    stx_tensor *out[3], *y = stx_recompute(x, twice, in, in, 2, out, 3);
    return stx_concat(x, stx_concat(x, y, stx_scale(x, out[0], 3)), stx_concat(x, out[1], out[2]));
}

static stx_tensor *op_linear_memory(stx_ctx *x, stx_tensor **in) {
    return stx_linear_memory(x, stx_detach(x, stx_concat(x, stx_scale(x, in[0], 0.5), in[0])),
                             in[0], in[1], in[2]);
}

static stx_tensor *op_linear_many(stx_ctx *x, stx_tensor **in) {
    return stx_linear_concat(x, in[0], in + 1, in + 3, 2);
}

/* Two pieces, the first with rows between streams that are not taken */
static stx_tensor *op_linear_past(stx_ctx *x, stx_tensor **in) {
    stx_tensor *m = stx_detach(x, in[0]), *y;
    const size_t C = m->dim[2];
    stx_cached_rows p[2];
    p[0].data = stx_offset_ptr(x, m->data, 2 * C);
    p[0].rows = 3;
    p[0].stride = 5 * C;
    p[1].data = m->data;
    p[1].rows = 5;
    p[1].stride = 5 * C;
    y = stx_linear_cached(x, p, 2, m->dim[0], in + 1, in + 3, 2);
    return stx_concat(
        x, y,
        stx_concat_channels(x, stx_linear_cached(x, p + 1, 1, m->dim[0], in + 1, in + 3, 1),
                            stx_linear(x, in[0], in[2], in[4], STX_ACT_NONE)));
}

/* Three heads in two groups, results one behind the other */
static stx_tensor *op_linear_heads(stx_ctx *x, stx_tensor **in) {
    stx_tensor *m = stx_detach(x, in[0]), *out[STX_HEAD_GROUPS], *a, *b;
    stx_head_groups g;
    stx_cached_rows p;
    memset(&g, 0, sizeof g);
    g.count = 2;
    g.rows[0] = 4;
    g.rows[1] = 2;
    g.of[1] = 1;
    p.data = stx_offset_ptr(x, m->data, m->dim[2]);
    p.rows = 4;
    p.stride = 5 * m->dim[2];
    if (!stx_linear_heads(x, &p, m->dim[0], in[1], in[2], 3, &g, out)) return NULL;
    a = stx_reshape(x, out[0], 1, out[0]->size, 1, 0);
    b = stx_reshape(x, out[1], 1, out[1]->size, 1, 0);
    return stx_concat(x, stx_concat(x, a, b), stx_reshape(x, in[0], 1, in[0]->size, 1, 0));
}

static stx_tensor *op_scale_by(stx_ctx *x, stx_tensor **in) {
    return stx_scale_by(x, in[0], in[1]);
}

static stx_tensor *op_log_softmax(stx_ctx *x, stx_tensor **in) {
    return stx_log_softmax(x, in[0]);
}

static stx_tensor *op_sum(stx_ctx *x, stx_tensor **in) {
    return stx_sum(x, in[0]);
}

static stx_tensor *op_slice_channels(stx_ctx *x, stx_tensor **in) {
    return stx_slice_channels(x, in[0], 3, 30);
}

static stx_tensor *op_view_rows(stx_ctx *x, stx_tensor **in) {
    size_t half_ = in[0]->dim[0] / 2;
    stx_tensor *a = stx_linear(x, in[1], stx_view_rows(x, in[0], 1, half_), NULL, STX_ACT_NONE);
    return stx_concat_channels(x, a,
                               stx_linear(x, in[1], stx_view_rows(x, in[0], half_, in[0]->dim[0]),
                                          NULL, STX_ACT_NONE));
}

static const struct op_row {
    const char *name;
    op_fn fn;
    size_t dim[MAX_IN][3];
    double half;
} ops[] = {
    {"linear", op_linear, {{3, 5, 7}, {11, 7, 0}, {11, 0, 0}}, 2e-2},
    {"linear relu", op_linear_relu, {{3, 5, 16}, {24, 16, 0}, {24, 0, 0}}, 2e-2},
    {"linear gelu", op_linear_gelu, {{3, 5, 16}, {24, 16, 0}, {24, 0, 0}}, 2e-2},
    {"linear tanh", op_linear_tanh, {{3, 5, 7}, {9, 7, 0}, {9, 0, 0}}, 3e-2},
    {"matmul", op_matmul, {{3, 5, 7}, {3, 7, 9}}, 2e-2},
    {"matmul shared", op_matmul, {{3, 5, 7}, {7, 9, 0}}, 2e-2},
    {"matmul transposed", op_matmul_t, {{3, 7, 5}, {3, 9, 7}}, 2e-2},
    {"layernorm", op_layernorm, {{3, 5, 33}, {33, 0, 0}, {33, 0, 0}}, 2e-2},
    {"residual_norm", op_residual, {{3, 5, 64}, {3, 5, 64}, {64, 0, 0}, {64, 0, 0}}, 2e-2},
    {"add", op_add, {{3, 5, 7}, {3, 5, 7}}, 1e-2},
    {"add rows", op_add, {{3, 5, 7}, {7, 0, 0}}, 1e-2},
    {"mul", op_mul, {{3, 5, 7}, {3, 5, 7}}, 1e-2},
    {"mul rows", op_mul, {{3, 5, 7}, {5, 7, 0}}, 1e-2},
    {"scale", op_scale, {{3, 5, 7}}, 1e-2},
    {"relu", op_relu, {{3, 5, 7}}, 1e-2},
    {"gelu", op_gelu, {{3, 5, 7}}, 1e-2},
    {"tanh", op_tanh, {{3, 5, 7}}, 2e-2},
    {"sigmoid", op_sigmoid, {{3, 5, 7}}, 2e-2},
    {"softmax", op_softmax, {{3, 5, 37}}, 2e-2},
    {"dropout", op_dropout, {{3, 5, 37}}, 1e-2},
    {"mean", op_mean, {{3, 5, 37}}, 1e-2},
    {"mse", op_mse, {{3, 5, 37}, {3, 5, 37}}, 2e-2},
    {"concat", op_concat, {{3, 5, 7}, {3, 2, 7}}, 1e-2},
    {"slice", op_slice, {{3, 5, 7}}, 1e-2},
    {"concat_channels", op_channels, {{3, 5, 7}, {3, 5, 4}}, 1e-2},
    {"reshape", op_reshape, {{3, 5, 7}}, 2e-2},
    {"detach", op_detach, {{3, 5, 7}}, 1e-2},
    {"gather", op_gather, {{3, 5, 7}}, 2e-2},
    {"embedding", op_embedding, {{19, 13, 0}}, 2e-2},
    {"cross_entropy", op_cross_entropy, {{3, 5, 41}}, 2e-2},
    {"cross_entropy_over", op_cross_entropy_over, {{3, 5, 41}}, 2e-2},
    {"cross_entropy_tokens", op_cross_entropy_tokens, {{3, 5, 41}}, 2e-2},
    {"adaptive_softmax_tokens",
     op_adaptive_tokens,
     {{11, 16, 0}, {8, 4, 0}, {16, 4, 0}, {1, 16, 0}, {2, 15, 16}, {4, 0, 0}},
     3e-2},
    {"adaptive_input", op_adaptive_input, {{11, 16, 0}, {8, 4, 0}, {16, 4, 0}}, 2e-2},
    {"adaptive_softmax",
     op_adaptive_softmax,
     {{11, 16, 0}, {8, 4, 0}, {16, 4, 0}, {1, 16, 0}, {2, 15, 16}},
     3e-2},
    {"scale_by", op_scale_by, {{3, 5, 7}, {1, 0, 0}}, 2e-2},
    {"log_softmax", op_log_softmax, {{3, 5, 37}}, 2e-2},
    {"sum", op_sum, {{3, 5, 37}}, 2e-2},
    {"slice_channels", op_slice_channels, {{3, 5, 37}}, 1e-2},
    {"view_rows", op_view_rows, {{11, 7, 0}, {3, 5, 7}}, 2e-2},
    {"view_rows, aligned", op_view_rows, {{40, 64, 0}, {3, 5, 64}}, 2e-2},
    {"linear_memory", op_linear_memory, {{3, 5, 7}, {11, 7, 0}, {11, 0, 0}}, 2e-2},
    {"linear_many",
     op_linear_many,
     {{3, 5, 7}, {11, 7, 0}, {4, 7, 0}, {11, 0, 0}, {4, 0, 0}},
     2e-2},
    {"linear_many, side by side",
     op_linear_many,
     {{3, 5, 64}, {64, 64, 0}, {128, 64, 0}, {64, 0, 0}, {128, 0, 0}},
     2e-2},
    {"linear_past",
     op_linear_past,
     {{3, 5, 7}, {11, 7, 0}, {4, 7, 0}, {11, 0, 0}, {4, 0, 0}},
     2e-2},
    {"linear_past, side by side",
     op_linear_past,
     {{3, 5, 64}, {64, 64, 0}, {128, 64, 0}, {64, 0, 0}, {128, 0, 0}},
     2e-2},
    {"linear_heads", op_linear_heads, {{3, 5, 7}, {15, 7, 0}, {15, 7, 0}}, 2e-2},
    {"linear_heads, aligned", op_linear_heads, {{2, 5, 64}, {48, 64, 0}, {48, 64, 0}}, 2e-2},
    {"recompute", op_recompute, {{3, 5, 7}, {3, 5, 7}}, 2e-2},
    {"recompute, several results", op_results, {{3, 5, 7}, {3, 5, 7}}, 2e-2},
    {"recompute, several results, aligned", op_results, {{3, 5, 64}, {3, 5, 64}}, 2e-2},
};

/* Values and gradients of a row in x: into out[0], out[1..]; inputs as parameters
   (floats with bf16 copies) if params. */
static void op_run(const struct op_row *o, int device, int precision, int params, float **data,
                   float **out, size_t *size) {
    stx_ctx *x = cuda_ctx(device, precision);
    stx_params *p = stx_params_create(x);
    stx_tensor *in[MAX_IN] = {0}, *y;
    float *dy;
    char name[8];
    int i, n;
    if (params) stx_params_make_contiguous(p, 1 << 16);
    for (n = 0; n < MAX_IN && o->dim[n][0]; n++)
        if (params) {
            snprintf(name, sizeof name, "p%d", n);
            in[n] = stx_param(p, STX_ZEROS, 0, name, o->dim[n][0], o->dim[n][1], o->dim[n][2], 0);
            stx_set(x, in[n], data[n]);
        }
    stx_begin(x, STX_TRAIN);
    for (i = 0; i < n && !params; i++)
        in[i] = stx_variable(x, data[i], o->dim[i][0], o->dim[i][1], o->dim[i][2], 0);
    y = o->fn(x, in);
    CHECK(stx_ok(x) && y, "%s, device %d: %s", o->name, device, stx_error(x));
    if (!y) {
        stx_destroy(x);
        return;
    }
    size[0] = y->size;
    out[0] = (float *)calloc(y->size, sizeof(float));
    stx_get(x, y, out[0]);
    dy = (float *)malloc(y->size * sizeof *dy);
    for (i = 0; i < (int)y->size; i++) dy[i] = (float)(((i * 37) % 17) - 8) / 8;
    stx_backward_from(x, y, dy);
    CHECK(stx_ok(x), "%s backward, device %d: %s", o->name, device, stx_error(x));
    for (i = 0; i < n; i++) {
        size[i + 1] = in[i]->size;
        out[i + 1] = (float *)calloc(in[i]->size, sizeof(float));
        if (in[i]->grad)
            stx_download(x, out[i + 1], in[i]->grad, in[i]->size);
        else
            CHECK(0, "%s: input %d has no gradient", o->name, i);
    }
    free(dy);
    stx_destroy(x);
}

static void test_ops(void) {
    size_t k, i, n;
    int precision, params, t;
    for (k = 0; k < sizeof ops / sizeof *ops; k++)
        for (precision = 0; precision < 2; precision++)
            for (params = 0; params < 2; params++) {
                const struct op_row *o = &ops[k];
                float *data[MAX_IN] = {0}, *want[MAX_IN + 1] = {0}, *got[MAX_IN + 1] = {0};
                size_t size[MAX_IN + 1] = {0};
                double tol = precision ? o->half : 2e-6;
                for (t = 0; t < MAX_IN && o->dim[t][0]; t++) {
                    n = o->dim[t][0] * (o->dim[t][1] ? o->dim[t][1] : 1)
                        * (o->dim[t][2] ? o->dim[t][2] : 1);
                    data[t] = cuda_random(n, 1.5, 0);
                    if (precision) cuda_round(data[t], n);
                }
                op_run(o, STX_CPU, STX_PREC_F32, params, data, want, size);
                op_run(o, STX_CUDA, precision ? STX_PREC_BF16 : STX_PREC_F32, params, data, got,
                       size);
                for (t = 0; t <= MAX_IN; t++) {
                    double worst = 0, top = 1e-3;
                    if (!want[t] || !got[t]) continue;
                    for (i = 0; i < size[t]; i++)
                        if (fabs((double)want[t][i]) > top) top = fabs((double)want[t][i]);
                    for (i = 0; i < size[t]; i++) {
                        double e = fabs((double)want[t][i] - (double)got[t][i]);
                        if (!(e <= worst)) worst = e;
                    }
                    CHECK(worst <= tol * top, "%s, precision %d, %s, %s %d: off by %g of %g",
                          o->name, precision, params ? "parameters" : "variables",
                          t ? "gradient" : "value", t, worst, top);
                    free(want[t]);
                    free(got[t]);
                }
                for (t = 0; t < MAX_IN; t++) free(data[t]);
            }
}

/* >>models */

typedef struct model {
    stx_ctx *x;
    stx_span *m;
    stx_optim *o;
    stx_span_state *s;
    stx_ids *in, *out;
    size_t B, T, V;
    double lr, loss;
    int parts;
    long calls;   /* of its step's function */
    uint64_t key; /* of its last step */
} model;

enum { SMALL, DROP, PERS, IO, LITERAL, RECOMPUTE, WIDE, FAIRSEQ, GROUPED, MODELS };

static const char *const model_names[MODELS] = {"adaptive span",  "dropout",
                                                "all-attention",  "adaptive input and output",
                                                "literal",        "recomputation",
                                                "wide",           "fairseq",
                                                "groups of heads"};

static int model_gpu;      /* of contexts made by what follows */
static size_t model_vocab; /* 0: what is usual */

static void model_make_sized(model *r, int which, int device, int precision, int no_graph, size_t B,
                             size_t layers) {
    stx_span_desc d;
    stx_optim_desc od;
    stx_desc cd;
    memset(r, 0, sizeof *r);
    memset(&d, 0, sizeof d);
    memset(&od, 0, sizeof od);
    memset(&cd, 0, sizeof cd);
    cd.device = device;
    cd.gpu = device == STX_CUDA ? model_gpu : 0;
    cd.precision = precision;
    cd.no_graph = no_graph;
    cd.seed = 5;
    cd.threads = 1;
    r->x = stx_create(&cd);
    r->B = B;
    r->T = 17;
    r->V = model_vocab ? model_vocab : which == IO ? 41 : 23;
    d.vocab = r->V;
    d.layers = layers;
    d.dim = which == WIDE ? 128 : 32;
    d.heads = 2;
    d.inner = 48;
    d.span = which == WIDE ? 96 : 40;
    d.adapt_span = 1;
    d.ramp = 8;
    d.span_init = 0.3;
    d.span_loss = 1e-4;
    if (which == DROP) {
        d.dropout = 0.2;
        d.emb_dropout = 0.1;
    }
    if (which == PERS) d.pers = 9;
    if (which == IO) {
        d.adapt_io = 1;
        d.cutoff[0] = 11;
        d.cutoffs = 1;
        d.adapt_io_tied = 1;
        d.divval = 2;
    }
    if (which == LITERAL) {
        d.literal = STX_SPAN_LITERAL;
        d.adapt_span = 1;
    }
    if (which == FAIRSEQ) {
        d.no_renorm = d.span_per_layer = d.fairseq_init = 1;
        d.ramp = 7.5;
        d.dropout = 0.1;
    }
    if (which == RECOMPUTE) {
        d.recompute = 1;
        d.dropout = 0.2;
    }
    if (which == GROUPED) {
        d.heads = 4;
        d.span = 800;
        r->T = 100;
    }
    r->m = stx_span_create(r->x, &d);
    /* windows of 800, 256 and twice 64 */
    for (layers = 0; which == GROUPED && r->m && layers < d.layers; layers++) {
        static const stx_real z[4] = {0.02f, 0.95f, 0.03f, 0.3f};
        stx_set(r->x, r->m->layer[layers].z, z);
    }
    od.kind = which == DROP                    ? STX_ADAM
              : which == RECOMPUTE             ? STX_RADAM
              : which == PERS || which == WIDE ? STX_SGD
                                               : STX_ADAGRAD;
    od.clip = which == PERS || which == WIDE ? 1 : 0.1;
    od.momentum = 0.9;
    od.weight_decay = which == RECOMPUTE ? 0.1 : 0;
    od.radam_skip = 1;
    r->o = stx_optim_create(r->m->params, &od);
    r->s = stx_span_state_create(r->m, r->B);
    r->in = stx_tokens_create(r->x, r->B, r->T);
    r->out = stx_tokens_create(r->x, r->B, r->T);
    r->lr = which == DROP                    ? 0.003
            : which == PERS || which == WIDE ? 0.05
            : which == IO                    ? 0.002
                                             : 0.02;
    CHECK(stx_ok(r->x), "%s, device %d: %s", model_names[which], device, stx_error(r->x));
}

static void model_make(model *r, int which, int device, int precision, int no_graph) {
    model_make_sized(r, which, device, precision, no_graph, 2, 2);
}

/* for what no kernel decides: replays, notes, files */
static void model_make_small(model *r, int which, int device, int precision, int no_graph) {
    model_make_sized(r, which, device, precision, no_graph, 1, 1);
}

static void model_step(void *user) {
    model *r = (model *)user;
    stx_tensor *loss;
    r->calls++;
    stx_begin(r->x, STX_TRAIN);
    loss = stx_span_loss(r->m, r->in, r->out, r->s, r->s);
    stx_metric_set(r->x, 0, loss, 1, 0);
    stx_backward(r->x, stx_span_total(r->m, loss));
    stx_optim_step(r->o, r->lr);
    stx_span_clamp(r->m);
}

/* The host's copy of the spans is that of the device, also when nothing else was asked
   for after the step. */
static void spans_current(model *r, const char *when) {
    size_t l, h;
    for (l = 0; l < r->m->desc.layers; l++)
        for (h = 0; h < r->m->desc.heads; h++) {
            stx_real z[8];
            double span = stx_span_of(r->m, l, h);
            stx_get(r->x, r->m->layer[l].z, z);
            if (r->m->desc.span_per_layer) z[h] = z[0];
            CHECK(span == (double)z[h] * (double)r->m->desc.span,
                  "%s: the host takes span %g of layer %d, head %d, it is %g", when, span, (int)l,
                  (int)h, (double)z[h] * (double)r->m->desc.span);
        }
}

/* Step n on its own tokens: the loss. What waits for the device waits outside of
   stx_step_run; *syncs gets the waits inside. */
static double model_run(model *r, int n, long *syncs) {
    int32_t *id = ids_of(r->B * r->T + 1, r->V, (size_t)n + 1);
    long before = 0;
    stx_tokens_set(r->x, r->in, id);
    stx_tokens_set(r->x, r->out, id + 1);
    r->lr *= n % 3 ? 1.05 : 0.85;
    stx_optim_set_lr(r->o, r->lr);
    r->key = stx_span_key(r->m, r->in, r->out, r->s, 0);
#ifdef SEQTX_CUDA_HOST
    before = cuda_host_syncs();
#endif
    stx_step_run(r->x, r->key, model_step, r);
#ifdef SEQTX_CUDA_HOST
    if (syncs) *syncs += cuda_host_syncs() - before;
#else
    (void)syncs;
    (void)before;
#endif
    free(id);
    if (r->m->desc.adapt_span && n % 4 == 3) spans_current(r, n < 10 ? "early" : "late");
    r->loss = stx_metric_get(r->x, 0);
    return r->loss;
}

static uint64_t model_hash(model *r) {
    uint64_t h = 1;
    size_t i;
    for (i = 0; i < r->m->params->count; i++)
        h = cuda_hash(r->x, r->m->params->tensor[i]->data, r->m->params->tensor[i]->size, h);
    return h;
}

static void model_free(model *r) {
    stx_span_state_free(r->s);
    stx_destroy(r->x);
}

enum { STEPS = 12 };

static void test_train(void) {
    int which, n, precision;
    for (precision = 0; precision < 2; precision++)
        for (which = 0; which < MODELS; which++) {
            model a, b;
            double worst = 0, tol = precision ? 3e-2 : which == LITERAL ? 2e-4 : 1e-4;
            size_t i;
            long syncs = 0, replays = 0;
            int replayed = which % 2;
            model_make(&a, which, STX_CPU, STX_PREC_F32, 0);
            model_make(&b, which, STX_CUDA, precision ? STX_PREC_BF16 : STX_PREC_F32, !replayed);
#ifdef SEQTX_CUDA_HOST
            replays = cuda_host_graph_launches();
#endif
            for (n = 0; n < STEPS; n++) {
                double la = model_run(&a, n, NULL), lb = model_run(&b, n, n > 8 ? &syncs : NULL);
                /* memories have their size by then */
                CHECK(stx_ok(b.x), "%s, step %d: %s", model_names[which], n, stx_error(b.x));
                CHECK(fabs(la - lb) <= tol * la,
                      "%s, precision %d, step %d: loss %.7f on the CPU, %.7f on the GPU",
                      model_names[which], precision, n, la, lb);
            }
            CHECK(a.loss < (which == IO ? 20 : 3.5) && a.loss > 0.1, "%s: the loss is %g",
                  model_names[which], a.loss);
            for (i = 0; i < a.m->params->count && !precision; i++) {
                double e = off(b.x, b.m->params->tensor[i], b.m->params->tensor[i]->data,
                               a.m->params->tensor[i]->data);
                if (!(e <= worst)) worst = e;
            }
            /* Adagrad and Adam divide by the size of the gradient: of one that is
               nothing but rounding, too */
            CHECK(worst <= (a.o->desc.kind == STX_SGD ? 1e-4 : 1e-2),
                  "%s: after %d steps a parameter is off by %g", model_names[which], STEPS, worst);
            CHECK(stx_optim_sync(b.o) && stx_optim_sync(a.o) && a.o->step == STEPS
                      && b.o->step == STEPS
                      && CLOSE(b.o->grad_norm, a.o->grad_norm, precision ? 0.1 : 1e-3),
                  "%s: %d updates, norm %g; CPU %g", model_names[which], (int)b.o->step,
                  b.o->grad_norm, a.o->grad_norm);
            CHECK(syncs == 0, "%s: the host waited %ld times inside steps", model_names[which],
                  syncs);
#ifdef SEQTX_CUDA_HOST
            replays = cuda_host_graph_launches() - replays;
            CHECK(which == IO || !replayed == !replays, "%s: %ld replays of %d steps",
                  model_names[which], replays, (int)STEPS);
#else
            (void)replays;
#endif
            model_free(&a);
            model_free(&b);
        }
}

/* A replayed step gives the same bits as one that is launched, dropout and the
   optimiser's counts included. */
static void test_graph(void) {
    int which, n;
    static const int models[] = {SMALL, DROP, PERS, RECOMPUTE, IO};
    for (which = 0; which < 5; which++) {
        model a, b;
        long graphs = 0;
        const size_t size = models[which] == RECOMPUTE ? 2 : 1; /* rows and layers */
        model_make_sized(&a, models[which], STX_CUDA, STX_PREC_F32, 1, size, size);
        model_make_sized(&b, models[which], STX_CUDA, STX_PREC_F32, 0, size, size);
#ifdef SEQTX_CUDA_HOST
        graphs = cuda_host_graph_launches();
#endif
        for (n = 0; n < 14; n++) {
            double la = model_run(&a, n, NULL), lb = model_run(&b, n, NULL);
            CHECK(la == lb, "%s, step %d: %.9g launched, %.9g replayed", model_names[models[which]],
                  n, la, lb);
            if (n == 9) { /* something else in between, in the same arenas */
                int32_t *id = ids_of(5, a.V, 9);
                stx_begin(b.x, STX_EVAL);
                CHECK(isfinite(
                          stx_item(b.x, stx_span_loss(b.m, stx_tokens(b.x, id, 1, 4),
                                                      stx_tokens(b.x, id + 1, 1, 4), NULL, NULL))),
                      "an evaluation between replays");
                free(id);
            }
        }
        CHECK(model_hash(&a) == model_hash(&b), "%s: replays leave other parameters",
              model_names[models[which]]);
        CHECK(stx_step_index(a.x) == stx_step_index(b.x),
              "the random stream: step index %d launched, %d replayed", (int)stx_step_index(a.x),
              (int)stx_step_index(b.x));
#ifdef SEQTX_CUDA_HOST
        CHECK(cuda_host_graph_launches() - graphs >= (models[which] == IO ? 0 : 5),
              "%s: %ld replays of 14 steps", model_names[models[which]],
              cuda_host_graph_launches() - graphs);
#else
        (void)graphs;
#endif
        model_free(&a);
        model_free(&b);
    }
}

/* The same while groups of heads change: three of them, others, one, and those of the
   beginning; memories are the same, too. */
static size_t groups_now(model *r) {
    stx_head_groups g;
    size_t need[4], h, L = r->m->desc.span;
    for (h = 0; h < 4; h++)
        need[h] = STX_MIN((size_t)ceil(stx_span_of(r->m, 0, h) + r->m->desc.ramp), L) + 1;
    stx_head_groups_choose(need, 4, STX_MIN(stx_span_window(r->m, 0), r->s->memory->layer[0].count),
                           &g);
    return g.count;
}

/* What a has in its memory is what b has */
static void same_memory(stx_memory *a, stx_memory *b, const char *what) {
    size_t l;
    for (l = 0; l < a->desc.layers; l++) {
        size_t n = a->B * a->layer[l].count * a->layer[l].width;
        stx_real *v = (stx_real *)calloc(2 * n, sizeof *v);
        CHECK(n && a->layer[l].count == b->layer[l].count && stx_memory_get(a, l, v)
                  && stx_memory_get(b, l, v + n) && !memcmp(v, v + n, n * sizeof *v),
              "%s: layer %zu remembers other rows", what, l);
        free(v);
    }
}

static void test_groups(void) {
    enum { PHASES = 6, EACH = 6, S = 800 };

    /* three groups, others, one, those of the beginning; a shorter window, and no
       other rows after it */
    static const stx_real z[PHASES][4] = {{0.02f, 0.95f, 0.03f, 0.3f},  {0.95f, 0.5f, 0.03f, 0.5f},
                                          {0.95f, 0.95f, 0.95f, 0.95f}, {0.02f, 0.95f, 0.03f, 0.3f},
                                          {0.4f, 0.03f, 0.2f, 0.03f},   {0.4f, 0.38f, 0.4f, 0.38f}};
    static const size_t groups[PHASES] = {3, 3, 1, 3, 2, 1};
    model a, b;
    stx_real *rows;
    uint64_t key = 0;
    int phase, n, step = 0;
    model_make_sized(&a, GROUPED, STX_CUDA, STX_PREC_F32, 1, 2, 1);
    model_make_sized(&b, GROUPED, STX_CUDA, STX_PREC_F32, 0, 2, 1);
    a.T = b.T = 24;
    a.in = stx_tokens_create(a.x, 2, 24);
    a.out = stx_tokens_create(a.x, 2, 24);
    b.in = stx_tokens_create(b.x, 2, 24);
    b.out = stx_tokens_create(b.x, 2, 24);
    rows = cuda_random(2 * S * 32, 1, 0); /* memories that are full */
    CHECK(stx_memory_set(a.s->memory, 0, S, rows, S) && stx_memory_set(b.s->memory, 0, S, rows, S),
          "%s", stx_error(a.x));
    free(rows);
    for (phase = 0; phase < PHASES; phase++) {
#ifdef SEQTX_CUDA_HOST
        long calls = b.calls, graphs = cuda_host_graph_launches();
#endif
        stx_set(a.x, a.m->layer[0].z, z[phase]);
        stx_set(b.x, b.m->layer[0].z, z[phase]);
        for (n = 0; n < EACH; n++, step++) {
            double la = model_run(&a, step, NULL), lb = model_run(&b, step, NULL);
            CHECK(la == lb && stx_ok(b.x), "phase %d, step %d: %.9g launched, %.9g replayed: %s",
                  phase, step, la, lb, stx_error(b.x));
        }
        CHECK(groups_now(&b) == groups[phase], "phase %d: %zu groups of heads", phase,
              groups_now(&b));
        CHECK(key != b.key, "phase %d has the key of the one before", phase);
        key = b.key;
        CHECK(model_hash(&a) == model_hash(&b), "phase %d: replays leave other parameters", phase);
        same_memory(a.s->memory, b.s->memory, "groups of heads");
#ifdef SEQTX_CUDA_HOST
        calls = b.calls - calls;
        graphs = cuda_host_graph_launches() - graphs;
        /* a step that is captured is called and launched; the first phase's graph may
           serve when its groups come again */
        CHECK(calls + graphs > EACH || phase == 3,
              "phase %d: no step was captured, %ld calls, %ld graphs", phase, calls, graphs);
        CHECK(calls < EACH && graphs, "phase %d: no step was replayed, %ld calls, %ld graphs",
              phase, calls, graphs);
#endif
    }
    model_free(&a);
    model_free(&b);
}

/* The same with all gradients of weights in pieces of K, whose sums wait for the end
   of backward. */
static void test_pieces(void) {
    static const int models[] = {SMALL, PERS};
    int i, n, precision;
    for (i = 0; i < 2; i++)
        for (precision = 0; precision < 2; precision++) {
            model a, b;
#ifdef SEQTX_CUDA_HOST
            /* launched; and of a step that is captured, when matmuls are counted */
            long batches = 0, most = 0, graphs;
#endif
            model_make_sized(&a, models[i], STX_CUDA, precision ? STX_PREC_BF16 : STX_PREC_F32, 1,
                             2, 1);
            model_make_sized(&b, models[i], STX_CUDA, precision ? STX_PREC_BF16 : STX_PREC_F32, 0,
                             2, 1);
            inner_pieces(a.x, 2);
            inner_pieces(b.x, 2);
#ifdef SEQTX_CUDA_HOST
            graphs = cuda_host_graph_launches();
#endif
            for (n = 0; n < 12; n++) {
                double la, lb;
#ifdef SEQTX_CUDA_HOST
                long had = cuda_host_batches();
                la = model_run(&a, n, NULL);
                batches = cuda_host_batches() - had;
                had = cuda_host_batches();
                lb = model_run(&b, n, NULL);
                most = STX_MAX(most, cuda_host_batches() - had);
#else
                la = model_run(&a, n, NULL);
                lb = model_run(&b, n, NULL);
#endif
                CHECK(la == lb && stx_ok(b.x),
                      "%s in pieces, step %d: %.9g launched, %.9g replayed: %s",
                      model_names[models[i]], n, la, lb, stx_error(b.x));
            }
            CHECK(model_hash(&a) == model_hash(&b), "%s in pieces: replays leave other parameters",
                  model_names[models[i]]);
            same_memory(a.s->memory, b.s->memory, "pieces");
#ifdef SEQTX_CUDA_HOST
            graphs = cuda_host_graph_launches() - graphs;
            CHECK(graphs > 4 && b.calls < 12, "%ld graphs of 12 steps, %ld calls", graphs, b.calls);
            { /* the last step without pieces has fewer batches, one for each weight */
                long had = cuda_host_batches();
                inner_pieces(a.x, 0);
                model_run(&a, n, NULL);
                had = cuda_host_batches() - had;
                CHECK(batches >= had + 4 && most >= batches,
                      "%ld batches of matmuls launched, %ld captured, %ld without pieces", batches,
                      most, had);
            }
#endif
            model_free(&a);
            model_free(&b);
        }
}

/* One step that goes on from memory to memory: a to b and b to a; or over three of
   them. It is replayed, with the bits of steps that are launched, and with the
   losses of a step that goes twice, or three times, from one memory to itself. */
typedef struct turning {
    model r;
    stx_span_state *s[3];
    int states, turns;
} turning;

static void turning_step(void *user) {
    turning *u = (turning *)user;
    model *r = &u->r;
    stx_tensor *sum = NULL;
    int k;
    r->calls++;
    stx_begin(r->x, STX_TRAIN);
    for (k = 0; k < u->turns; k++) {
        stx_tensor *loss = stx_span_loss(r->m, r->in, r->out, u->s[k % u->states],
                                         u->s[(k + 1) % u->states]);
        stx_metric_set(r->x, k, loss, 1, 0);
        sum = sum ? stx_add(r->x, sum, loss) : loss;
    }
    stx_backward(r->x, sum);
    stx_optim_step(r->o, r->lr);
    stx_span_clamp(r->m);
}

static void turning_make(turning *u, int which, int precision, int no_graph, int states,
                         int turns) {
    int k;
    memset(u, 0, sizeof *u);
    model_make_sized(&u->r, which, STX_CUDA, precision, no_graph, 2, 2);
    u->states = states;
    u->turns = turns;
    u->s[0] = u->r.s;
    for (k = 1; k < states; k++) u->s[k] = stx_span_state_create(u->r.m, u->r.B);
}

static void turning_run(turning *u, int n, double *loss) {
    model *r = &u->r;
    int32_t *id = ids_of(r->B * r->T + 1, r->V, (size_t)n + 1);
    int k;
    stx_tokens_set(r->x, r->in, id);
    stx_tokens_set(r->x, r->out, id + 1);
    free(id);
    stx_optim_set_lr(r->o, r->lr);
    for (r->key = 0, k = 0; k < u->states; k++)
        r->key = stx_span_key(r->m, r->in, r->out, u->s[k], r->key);
    stx_step_run(r->x, r->key, turning_step, u);
    for (k = 0; k < u->turns; k++) loss[k] = stx_metric_get(r->x, k);
}

static void turning_free(turning *u) {
    int k;
    for (k = 1; k < u->states; k++) stx_span_state_free(u->s[k]);
    model_free(&u->r);
}

static void test_turns(void) {
    static const struct {
        int which, precision, states, turns;
    } of[] = {{SMALL, STX_PREC_F32, 2, 2},
              {DROP, STX_PREC_BF16, 3, 3},
              {SMALL, STX_PREC_F32, 2, 4}};

    enum { ALL = 12 };

    size_t i;
    for (i = 0; i < sizeof of / sizeof *of; i++) {
        turning a, b, c;
        int n, k;
#ifdef SEQTX_CUDA_HOST
        long graphs = cuda_host_graph_launches(), allocs = 0;
#endif
        turning_make(&a, of[i].which, of[i].precision, 1, of[i].states, of[i].turns);
        turning_make(&b, of[i].which, of[i].precision, 0, of[i].states, of[i].turns);
        /* in one memory */
        turning_make(&c, of[i].which, of[i].precision, 1, 1, of[i].turns);
        for (n = 0; n < ALL; n++) {
            double la[4], lb[4], lc[4];
#ifdef SEQTX_CUDA_HOST
            if (n == 7) allocs = cuda_host_allocs();
#endif
            turning_run(&a, n, la);
            turning_run(&b, n, lb);
            turning_run(&c, n, lc);
            for (k = 0; k < of[i].turns; k++) {
                CHECK(la[k] == lb[k] && stx_ok(b.r.x),
                      "case %d, step %d, turn %d: %.9g launched, %.9g replayed: %s", (int)i, n, k,
                      la[k], lb[k], stx_error(b.r.x));
                CHECK(fabs(la[k] - lc[k])
                          <= (of[i].precision == STX_PREC_BF16 ? 1e-2 : 1e-5) * la[k],
                      "case %d, step %d, turn %d: %.9g, in one memory %.9g", (int)i, n, k, la[k],
                      lc[k]);
            }
        }
        CHECK(model_hash(&a.r) == model_hash(&b.r), "case %d: replays leave other parameters",
              (int)i);
        CHECK(stx_step_index(a.r.x) == stx_step_index(b.r.x), "step index %d launched, %d replayed",
              (int)stx_step_index(a.r.x), (int)stx_step_index(b.r.x));
        for (k = 0; k < of[i].states; k++) same_memory(a.s[k]->memory, b.s[k]->memory, "turns");
#ifdef SEQTX_CUDA_HOST
        graphs = cuda_host_graph_launches() - graphs;
        allocs = cuda_host_allocs() - allocs;
        CHECK(graphs > 3 && b.r.calls < ALL && !allocs && !*stx_step_replay_status(b.r.x),
              "case %d: %ld graphs, %ld of %d steps called their "
              "function, %ld allocations: %s",
              (int)i, graphs, b.r.calls, (int)ALL, allocs, stx_step_replay_status(b.r.x));
#endif
        turning_free(&a);
        turning_free(&b);
        turning_free(&c);
    }
}

/* Rows with more room than they need, which ops look at where they are or copy, begin
   each step at the same address. */
static void test_room(void) {
    stx_desc cd;
    stx_memory_desc d;
    stx_ctx *x;
    stx_memory *s;
    stx_real v[2 * 3 * 8] = {0};
    uint64_t key = 0;
    int n;
    memset(&cd, 0, sizeof cd);
    memset(&d, 0, sizeof d);
    cd.device = STX_CUDA;
    d.B = 2;
    d.layers = 2;
    d.width = 8;
    x = stx_create(&cd);
    s = stx_memory_create(x, &d);
    CHECK(stx_memory_reserve(s, 50), "%s", stx_error(x));
    for (n = 0; n < 12; n++) {
        const stx_real *at = s->layer[0].data, *of = s->layer[1].data;
        stx_cached_rows past;
        stx_tensor *h;
        CHECK(n < 6 || key == stx_memory_key(s, 1), "step %d begins %d and %d rows further", n,
              (int)s->layer[0].offset, (int)s->layer[1].offset);
        key = stx_memory_key(s, 1);
        stx_begin(x, STX_TRAIN);
        h = stx_input(x, v, 2, 3, 8, 0);
        CHECK(stx_memory_view(s, 0, 7, &past) && (!n || stx_memory_read(s, 1, 7)), "%s",
              stx_error(x));
        CHECK(stx_memory_push(s, s, 0, 7, h, NULL) && stx_memory_push(s, s, 1, 7, h, NULL), "%s",
              stx_error(x));
        CHECK(n < 6 || (at == s->layer[0].data && of == s->layer[1].data), "step %d", n);
    }
    stx_memory_free(s);
    stx_destroy(x);
}

/* Scalars are set between replays, and constants, made after the first replays, do not
   end them. The same bits as without graphs. */
typedef struct scaled {
    stx_ctx *x;
    stx_params *p;
    stx_optim *o;
    stx_tensor *table, *scale;
    int inside;
    double value;
} scaled;

static void scaled_make(scaled *u, int precision, int no_graph) {
    stx_desc cd;
    stx_optim_desc od;
    stx_real v[6 * 32];
    int i;
    memset(u, 0, sizeof *u);
    memset(&cd, 0, sizeof cd);
    memset(&od, 0, sizeof od);
    cd.device = STX_CUDA;
    cd.precision = precision;
    cd.no_graph = no_graph;
    cd.threads = 1;
    u->x = stx_create(&cd);
    u->p = stx_params_create(u->x);
    stx_param(u->p, STX_NORMAL, 0.3, "w", 16, 32, 0, 0);
    u->o = stx_optim_create(u->p, &od);
    for (i = 0; i < 6 * 32; i++) v[i] = (stx_real)sin(i * i);
    u->table = stx_constant_create(u->x, v, 6, 32, 0, 0);
    u->scale = stx_scalar_create(u->x, 1);
}

static void scaled_step(void *user) {
    scaled *u = (scaled *)user;
    stx_tensor *y;
    stx_begin(u->x, STX_TRAIN);
    if (u->inside) stx_scalar_set(u->x, u->scale, u->value);
    y = stx_softmax(u->x, stx_scale_by(u->x,
                                       stx_linear(u->x, u->table, stx_params_find(u->p, "w"), NULL,
                                                  STX_ACT_NONE),
                                       u->scale));
    y = stx_mean(u->x, stx_mul(u->x, y, y));
    stx_metric_set(u->x, 0, y, 1, 0);
    stx_backward(u->x, y);
    stx_optim_step(u->o, 0.01);
}

static void test_scalars(void) {
    int precision, inside, n;
    for (precision = 0; precision < 2; precision++)
        for (inside = 0; inside < 2; inside++) {
            scaled a, b;
            long graphs = 0;
            double last = -1;
            scaled_make(&a, precision, 1);
            scaled_make(&b, precision, 0);
            a.inside = b.inside = inside;
#ifdef SEQTX_CUDA_HOST
            graphs = cuda_host_graph_launches();
#endif
            for (n = 0; n < 12; n++) {
                double la, lb;
                a.value = b.value = 0.5 + 0.25 * n;
                if (!inside) {
                    stx_scalar_set(a.x, a.scale, a.value);
                    stx_scalar_set(b.x, b.scale, b.value);
                }
                if (n == 6) {
                    stx_real one = 1;
                    CHECK(stx_constant_create(b.x, &one, 1, 0, 0, 0) && stx_scalar_create(b.x, 2),
                          "%s", stx_error(b.x));
                }
                stx_step_run(a.x, 3, scaled_step, &a);
                stx_step_run(b.x, 3, scaled_step, &b);
                la = stx_metric_get(a.x, 0);
                lb = stx_metric_get(b.x, 0);
                CHECK(la == lb && la > 0 && la != last && stx_ok(b.x),
                      "scalar set %s, step %d: %.9g launched, %.9g replayed: %s",
                      inside ? "inside" : "between", n, la, lb, stx_error(b.x));
                last = la;
            }
#ifdef SEQTX_CUDA_HOST
            graphs = cuda_host_graph_launches() - graphs;
            CHECK(inside ? graphs == 0 : graphs >= 9, "scalar set %s: %ld replays of 12 steps",
                  inside ? "inside" : "between", graphs);
#else
            (void)graphs;
#endif
            CHECK(inside == (strstr(stx_step_replay_status(b.x), "set a scalar") != NULL),
                  "note: %s", stx_step_replay_status(b.x));
            stx_destroy(a.x);
            stx_destroy(b.x);
        }
}

/* Adaptive input and softmax, with rows that are left out: steps whose tokens need the
   same rooms are replayed, with the same bits as when launched. blind: the key says
   nothing of them; a replayed step whose ids do not fit has no update. */
enum { CB = 4, CT = 16, CV = 41 };

typedef struct clustered {
    stx_ctx *x;
    stx_params *p;
    stx_optim *o;
    stx_adaptive in, out;
    stx_ids *ids, *targets;
    stx_token_loss how;
} clustered;

static void clustered_make(clustered *u, int precision, int no_graph) {
    static const size_t end[3] = {11, 25, CV};
    static const char *const name[5] = {"table%d", "proj%d", "out%d", "out_proj%d", "out_bias%d"};
    stx_desc cd;
    stx_optim_desc od;
    int c;
    memset(u, 0, sizeof *u);
    memset(&cd, 0, sizeof cd);
    memset(&od, 0, sizeof od);
    cd.device = STX_CUDA;
    cd.precision = precision;
    cd.no_graph = no_graph;
    cd.threads = 1;
    u->x = stx_create(&cd);
    u->p = stx_params_create(u->x);
    u->in.clusters = u->out.clusters = 3;
    u->in.dropout = u->out.dropout = 0.1;
    for (c = 0; c < 3; c++) {
        char n[5][16];
        size_t size = end[c] - (c ? end[c - 1] : 0), w = 16 >> c;
        int i;
        for (i = 0; i < 5; i++) snprintf(n[i], sizeof n[i], name[i], c);
        u->in.end[c] = u->out.end[c] = end[c];
        u->in.table[c] = stx_param(u->p, STX_NORMAL, 0.2, n[0], size, w, 0, 0);
        u->in.proj[c] = stx_param(u->p, STX_NORMAL, 0.2, n[1], 16, w, 0, 0);
        u->out.table[c] = stx_param(u->p, STX_NORMAL, 0.2, n[2], size, w, 0, 0);
        u->out.proj[c] = stx_param(u->p, STX_NORMAL, 0.2, n[3], 16, w, 0, 0);
        u->out.proj_bias[c] = stx_param(u->p, STX_NORMAL, 0.2, n[4], w, 0, 0, 0);
    }
    u->out.cluster_w = stx_param(u->p, STX_NORMAL, 0.2, "clusters", 2, 16, 0, 0);
    if (!no_graph) { /* gradients in one block: no other bits */
        size_t n;
        CHECK(stx_params_grads(u->p, &n) && n > stx_params_size(u->p) && n % 64 == 0, "%s",
              stx_error(u->x));
    }
    u->o = stx_optim_create(u->p, &od);
    u->ids = stx_tokens_create(u->x, CB, CT);
    u->targets = stx_tokens_create(u->x, CB, CT);
    u->how.ignore = 1;
    u->how.ignored_id = 3;
    u->how.mean = 1;
    CHECK(stx_ok(u->x), "%s", stx_error(u->x));
}

static void clustered_step(void *user) {
    clustered *u = (clustered *)user;
    stx_tensor *y;
    stx_begin(u->x, STX_TRAIN);
    y = stx_tanh(u->x, stx_adaptive_input(u->x, &u->in, u->ids));
    y = stx_adaptive_softmax_tokens(u->x, &u->out, y, u->targets, &u->how);
    stx_metric_set(u->x, 0, y, 1, 0);
    stx_metric_set(u->x, 1, stx_sum(u->x, u->how.nll), 1, 0);
    stx_backward(u->x, y);
    stx_optim_step(u->o, 0.01);
}

/* Step n: the same counts in each cluster for all n of one kind, in another order */
static int clustered_run(clustered *u, int n, int kind, int blind) {
    int32_t id[CB * CT], next[CB * CT];
    uint64_t key = 5;
    int i;
    for (i = 0; i < CB * CT; i++) {
        int k = (i * 7 + 3 * n) % (CB * CT), many = kind ? 40 : 20;
        id[i] = k < many ? 11 + (i + n) % 14 : k < many + 8 ? 25 + (i * n) % 16 : (i + n) % 11;
        next[i] = k < 10         ? 3
                  : k < many     ? 11 + (i * n) % 14
                  : k < many + 6 ? 25 + (i + n) % 16
                                 : 4 + (i + n) % 7;
    }
    stx_tokens_set(u->x, u->ids, id);
    stx_tokens_set(u->x, u->targets, next);
    if (!blind)
        key = stx_adaptive_key(stx_adaptive_key(key, &u->in, u->ids, 0, NULL), &u->out, u->targets,
                               1, &u->how);
    return stx_step_run(u->x, key, clustered_step, u);
}

static void test_clusters(void) {
    int precision, n;
    for (precision = 0; precision < 2; precision++) {
        clustered a, b;
        long graphs = 0;
        size_t i;
        int blind;
        clustered_make(&a, precision, 1);
        clustered_make(&b, precision, 0);
#ifdef SEQTX_CUDA_HOST
        graphs = cuda_host_graph_launches();
#endif
        for (n = 0; n < 16; n++) {
            clustered_run(&a, n, n % 8 >= 5, 0);
            clustered_run(&b, n, n % 8 >= 5, 0);
            CHECK(stx_metric_get(a.x, 0) == stx_metric_get(b.x, 0)
                      && stx_metric_get(a.x, 1) == stx_metric_get(b.x, 1)
                      && stx_metric_get(a.x, 1) > stx_metric_get(a.x, 0) && stx_ok(b.x),
                  "step %d: %.9g launched, %.9g replayed: %s", n, stx_metric_get(a.x, 0),
                  stx_metric_get(b.x, 0), stx_error(b.x));
        }
#ifdef SEQTX_CUDA_HOST
        CHECK(cuda_host_graph_launches() - graphs >= 10, "clusters: %ld replays of 16 steps",
              cuda_host_graph_launches() - graphs);
#else
        (void)graphs;
#endif
        for (i = 0; i < a.p->count; i++)
            CHECK(cuda_hash(a.x, a.p->tensor[i]->data, a.p->tensor[i]->size, 1)
                      == cuda_hash(b.x, b.p->tensor[i]->data, b.p->tensor[i]->size, 1),
                  "%s: replays leave other bits", a.p->name[i]);
        CHECK(stx_optim_sync(b.o) && b.o->step == 16, "%d updates", (int)b.o->step);
        for (blind = 0; blind < 6; blind++) {
            uint64_t h;
            h = cuda_hash(b.x, b.in.table[1]->data, b.in.table[1]->size, 1);
            clustered_run(&b, blind, blind == 4, 1);
            CHECK(stx_ok(b.x) && isnan(stx_metric_get(b.x, 0)) == (blind == 4),
                  "too few places: loss %g", stx_metric_get(b.x, 0));
            CHECK((cuda_hash(b.x, b.in.table[1]->data, b.in.table[1]->size, 1) == h)
                      == (blind == 4),
                  "too few places: an update");
        }
        CHECK(stx_optim_sync(b.o) && b.o->skipped == 1 && b.o->step == 21,
              "%d updates, %d left out", (int)b.o->step, (int)b.o->skipped);
        stx_destroy(a.x);
        stx_destroy(b.x);
    }
}

/* Sums of rows that backward leaves for later: of parameters that several ops have, of
   more than a table holds, of one that is gain and shift, and of a bias that is no
   parameter, whose gradient is read before backward ends. */
enum { LATE_N = 70, LATE_C = 36, LATE_OPS = 17 };

static void late_grads(int device, int precision, stx_real *got) {
    stx_ctx *x = cuda_ctx(device, precision);
    stx_params *p = stx_params_create(x);
    float *a = cuda_random(LATE_N * LATE_C, 1, 0);
    stx_tensor *w = stx_param(p, STX_NORMAL, 0.1, "w", LATE_C, LATE_C, 0, 0),
               *b = stx_param(p, STX_NORMAL, 0.1, "b", LATE_C, 0, 0, 0);
    stx_tensor *gain = stx_param(p, STX_CONSTANT, 1, "gain", LATE_C, 0, 0, 0);
    stx_tensor *both = stx_param(p, STX_CONSTANT, 0.5, "both", LATE_C, 0, 0, 0);
    stx_tensor *own[LATE_OPS][2], *h, *f;
    size_t i, k;
    char name[2][24];
    for (i = 0; i < LATE_OPS; i++)
        for (k = 0; k < 2; k++) {
            snprintf(name[k], sizeof name[k], "own.%d.%d", (int)i, (int)k);
            own[i][k] = stx_param(p, STX_CONSTANT, (double)k, name[k], LATE_C, 0, 0, 0);
        }
    stx_begin(x, STX_TRAIN);
    h = stx_input(x, a, LATE_N, LATE_C, 0, 0);
    for (i = 0; i < LATE_OPS; i++) {
        f = stx_linear(x, h, w, i % 3 ? b : own[i][0], i % 2 ? STX_ACT_RELU : STX_ACT_TANH);
        /* no parameter */
        if (i % 4 == 3) f = stx_linear(x, f, w, stx_scale(x, b, 0.7), STX_ACT_NONE);
        h = i % 5 == 4 ? stx_layernorm(x, f, both, both, 0)
            : i % 5 == 3
                ? stx_residual_norm(x, h, f, 0, gain, b, 0)
                : stx_residual_norm_bias(x, h, f, i % 2 ? b : own[i][0], 0.1, own[i][1],
                                         i % 3 ? own[i][0] : own[(i + 1) % LATE_OPS][0], 0);
    }
    stx_backward(x, stx_mean(x, stx_mul(x, h, h)));
    for (i = 0; i < p->count; i++) {
        stx_get_grad(x, p->tensor[i], got);
        got += p->tensor[i]->size;
    }
    CHECK(stx_ok(x), "sums that wait: %s", stx_error(x));
    free(a);
    stx_destroy(x);
}

static void test_late(void) {
    enum { ALL = LATE_C * LATE_C + (3 + 2 * LATE_OPS) * LATE_C };

    static stx_real c[ALL], g[ALL];
    int precision, i;
    for (precision = 0; precision < 2; precision++) {
        double worst = 0, top = 0;
        uint64_t state = test_state;
        late_grads(STX_CPU, STX_PREC_F32, c);
        test_state = state;
        late_grads(STX_CUDA, precision ? STX_PREC_BF16 : STX_PREC_F32, g);
        for (i = 0; i < ALL; i++) {
            if (fabs((double)c[i]) > top) top = fabs((double)c[i]);
            if (!(fabs((double)c[i] - (double)g[i]) <= worst))
                worst = fabs((double)c[i] - (double)g[i]);
        }
        CHECK(worst <= (precision ? 0.1 : 1e-4) * top && top > 0,
              "sums that wait, precision %d: off by %g of %g", precision, worst, top);
    }
}

/* PADDED LOGITS: words of all kinds whose rows are no multiple of 8, with their
   gradients, logits and log p, on both devices; and updates, after which the room
   behind a table is what it was. */
typedef struct worded {
    stx_ctx *x;
    stx_params *p;
    stx_vocab_io *w;
    stx_optim *o;
} worded;

enum { WORDS_B = 3, WORDS_T = 7, WORDS_N = 21, WORDS_V = 205, WORDS_D = 32, WORDS_KINDS = 5 };

static void worded_make(worded *u, int kind, int device, int precision) {
    stx_vocab_io_desc d;
    stx_optim_desc od;
    stx_desc cd;
    size_t i;
    memset(&d, 0, sizeof d);
    memset(&od, 0, sizeof od);
    memset(&cd, 0, sizeof cd);
    cd.device = device;
    cd.precision = precision;
    cd.threads = 1;
    cd.seed = 9;
    u->x = stx_create(&cd);
    u->p = stx_params_create(u->x);
    d.vocab = WORDS_V;
    d.dim = WORDS_D;
    d.table.kind = d.out_table.kind = d.proj.kind = d.bias.kind = d.cluster.kind =
        d.cluster_bias.kind = STX_NORMAL;
    d.table.a = d.out_table.a = d.proj.a = d.bias.a = d.cluster.a = d.cluster_bias.a = 0.3;
    d.out = kind == 0 ? STX_VOCAB_PLAIN : kind == 1 ? STX_VOCAB_TIED : STX_VOCAB_ADAPTIVE;
    if (kind >= 2) {
        d.in = STX_VOCAB_ADAPTIVE;
        d.cutoff[0] = 53;
        d.cutoff[1] = 112;
        d.cutoffs = 2;
        d.divval = 2;
    }
    if (kind >= 3) {
        d.share_tables = 1;
        d.cluster_major = kind == 3;
    }
    u->w = stx_vocab_io_create(u->p, &d);
    od.kind = STX_ADAMW;
    od.weight_decay = 0.1;
    od.clip = 0.5;
    u->o = stx_optim_create(u->p, &od);
    CHECK(stx_ok(u->x), "words %d, device %d: %s", kind, device, stx_error(u->x));
    for (i = 0; i < u->p->count; i++)
        CHECK(device == STX_CPU || kind
                  || u->p->tensor[i]->padding
                         == (i == 0   ? 0
                             : i == 1 ? 51 * WORDS_D
                                      : 51),
              "room behind %s: %zu", u->p->name[i], u->p->tensor[i]->padding);
}

/* The loss of number `which` of its ways: the model's, with weights and an ignored id,
   or from public logits; gradients of all */
static stx_tensor *worded_loss(worded *u, int which, const float *h, const int32_t *id,
                               stx_tensor **var) {
    stx_ids *ids;
    stx_tensor *e;
    stx_token_loss how;
    stx_begin(u->x, STX_TRAIN);
    ids = stx_tokens(u->x, id, WORDS_B, WORDS_T);
    *var = stx_variable(u->x, h, WORDS_B, WORDS_T, WORDS_D, 0);
    e = stx_add(u->x, *var, stx_vocab_io_embed(u->w, ids));
    memset(&how, 0, sizeof how);
    how.ignore = how.mean = 1;
    how.ignored_id = id[4];
    if (which == 0) return stx_vocab_io_loss(u->w, e, ids, NULL);
    if (which == 1) return stx_vocab_io_loss(u->w, e, ids, &how);
    return stx_cross_entropy_inplace(u->x, stx_vocab_io_logits(u->w, e), ids, 0);
}

static void worded_near(worded *a, worded *b, const stx_tensor *s, const stx_tensor *t, int grads,
                        double tol, const char *what, int kind) {
    float *c = (float *)malloc(s->size * sizeof *c), *g = (float *)malloc(s->size * sizeof *g);
    double worst = 0, top = 1e-6;
    size_t i;
    if (grads) {
        stx_get_grad(a->x, s, c);
        stx_get_grad(b->x, t, g);
    } else {
        stx_get(a->x, s, c);
        stx_get(b->x, t, g);
    }
    for (i = 0; i < s->size; i++) {
        if (fabs((double)c[i]) > top) top = fabs((double)c[i]);
        if (!(fabs((double)c[i] - (double)g[i]) <= worst))
            worst = fabs((double)c[i] - (double)g[i]);
    }
    CHECK(worst <= tol * top, "words %d, %s: off by %g of %g", kind, what, worst, top);
    free(c);
    free(g);
}

static void test_words(void) {
    int kind, precision, which;
    size_t i, k;
    float *h = cuda_random(WORDS_N * WORDS_D, 1, 0);
    int32_t *id = ids_of(WORDS_N, WORDS_V, 3);
    for (precision = 0; precision < 2; precision++)
        for (kind = 0; kind < WORDS_KINDS; kind++) {
            worded a, b;
            double tol = precision ? 3e-2 : 2e-5;
#ifdef SEQTX_CUDA_HOST
            long unaligned = cuda_host_unaligned();
#endif
            worded_make(&a, kind, STX_CPU, STX_PREC_F32);
            worded_make(&b, kind, STX_CUDA, precision ? STX_PREC_BF16 : STX_PREC_F32);
            for (which = 0; which < (kind < 2 ? 3 : 2); which++) {
                stx_tensor *va, *vb, *la = worded_loss(&a, which, h, id, &va),
                                     *lb = worded_loss(&b, which, h, id, &vb);
                CHECK(stx_ok(b.x) && CLOSE(stx_item(a.x, la), stx_item(b.x, lb), tol),
                      "words %d, way %d: loss %g on the CPU, %g on the GPU, "
                      "%s",
                      kind, which, stx_item(a.x, la), stx_item(b.x, lb), stx_error(b.x));
                stx_backward(a.x, la);
                stx_backward(b.x, lb);
                worded_near(&a, &b, va, vb, 1, tol, "gradient of h", kind);
                for (i = 0; i < a.p->count; i++)
                    worded_near(&a, &b, a.p->tensor[i], b.p->tensor[i], 1, tol, a.p->name[i], kind);
                stx_optim_step(a.o, 1e-3);
                stx_optim_step(b.o, 1e-3);
            }
            stx_begin(a.x, STX_EVAL);
            stx_begin(b.x, STX_EVAL);
            {
                stx_tensor *sa = stx_input(a.x, h, WORDS_B, WORDS_T, WORDS_D, 0),
                           *sb = stx_input(b.x, h, WORDS_B, WORDS_T, WORDS_D, 0);
                stx_tensor *pa = stx_vocab_io_log_probs(a.w, sa),
                           *pb = stx_vocab_io_log_probs(b.w, sb);
                CHECK(pb && pb->dim[2] == WORDS_V, "words %d: log p of %zu words: %s", kind,
                      pb ? pb->dim[2] : 0, stx_error(b.x));
                if (pb) worded_near(&a, &b, pa, pb, 0, tol, "log p", kind);
                if (kind < 2) {
                    sa = stx_vocab_io_logits(a.w, sa);
                    sb = stx_vocab_io_logits(b.w, sb);
                    CHECK(sb && sb->dim[2] == WORDS_V && sb->size == WORDS_N * WORDS_V,
                          "words %d: logits: %s", kind, stx_error(b.x));
                    if (sb) worded_near(&a, &b, sa, sb, 0, tol, "logits", kind);
                }
            }
            for (i = 0; i < b.p->count; i++) {
                const stx_tensor *t = b.p->tensor[i];
                float *room = (float *)calloc(t->padding + 1, sizeof *room);
                stx_download(b.x, room, stx_offset_ptr(b.x, t->data, t->size), t->padding);
                for (k = 0; k < t->padding && room[k] == 0; k++) continue;
                CHECK(k == t->padding, "words %d: number %zu of the room behind %s is %g", kind, k,
                      b.p->name[i], (double)room[k]);
                free(room);
                CHECK(a.p->tensor[i]->padding == 0, "room on a CPU");
            }
            CHECK(stx_ok(a.x) && stx_ok(b.x), "words %d: %s%s", kind, stx_error(a.x),
                  stx_error(b.x));
#ifdef SEQTX_CUDA_HOST
            CHECK(cuda_host_unaligned() == unaligned, "words %d: %ld products of unaligned rows",
                  kind, cuda_host_unaligned() - unaligned);
#endif
            stx_destroy(a.x);
            stx_destroy(b.x);
        }
    free(h);
    free(id);
}

/* A vocabulary of 205: training as on the CPU, and no product of a step has unaligned
   rows. */
static void test_odd_vocabulary(void) {
    int precision, n;
    model_vocab = 205;
    for (precision = 0; precision < 2; precision++) {
        model a, b;
        double worst = 0, tol = precision ? 3e-2 : 1e-4;
        size_t i;
#ifdef SEQTX_CUDA_HOST
        long unaligned = cuda_host_unaligned();
#endif
        model_make(&a, SMALL, STX_CPU, STX_PREC_F32, 0);
        model_make(&b, SMALL, STX_CUDA, precision ? STX_PREC_BF16 : STX_PREC_F32, 0);
        for (n = 0; n < STEPS; n++) {
            double la = model_run(&a, n, NULL), lb = model_run(&b, n, NULL);
            CHECK(stx_ok(b.x) && fabs(la - lb) <= tol * la,
                  "205 words, step %d: loss %.7f on the CPU, %.7f on the GPU: %s", n, la, lb,
                  stx_error(b.x));
        }
        for (i = 0; i < a.m->params->count && !precision; i++) {
            double e = off(b.x, b.m->params->tensor[i], b.m->params->tensor[i]->data,
                           a.m->params->tensor[i]->data);
            if (!(e <= worst)) worst = e;
        }
        CHECK(worst <= 1e-2, "205 words: after %d steps a parameter is off by %g", STEPS, worst);
#ifdef SEQTX_CUDA_HOST
        CHECK(cuda_host_unaligned() == unaligned, "205 words: %ld products of unaligned rows",
              cuda_host_unaligned() - unaligned);
#endif
        model_free(&a);
        model_free(&b);
    }
    model_vocab = 0;
}
#ifdef SEQTX_CUDA_HOST
/* How many nodes a layer adds to a step's graph, with the memory full: what one with 3
   layers has more than one with 2. Each of them costs the GPU a microsecond or two,
   whatever it does. `build/test_cuda_model nodes` names them. */
static void test_nodes(void) {
    /* also with the gradients of weights in pieces, whose sums wait */
    static const struct {
        int which;
        long most;
        int pieces;
    } want[] = {{SMALL, 29, 0}, {SMALL, 30, 2}, {DROP, 31, 0}, {PERS, 21, 0}, {GROUPED, 33, 0}};

    long whole[2] = {0, 0};
    size_t i;
    for (i = 0; i < sizeof want / sizeof *want; i++) {
        cuda_nodes all;
        int k, n;
        memset(&all, 0, sizeof all);
        for (k = 0; k < 2; k++) {
            model r;
            long batches = cuda_host_batches(), graphs = cuda_host_graph_launches();
            model_make_sized(&r, want[i].which, STX_CUDA, STX_PREC_BF16, 0, 2, (size_t)(2 + k));
            inner_pieces(r.x, want[i].pieces);
            for (n = 0; n < 14; n++) model_run(&r, n, NULL);
            batches = cuda_host_batches() - batches;
            if (i == 0) whole[k] = batches;
            CHECK(!want[i].pieces || batches >= whole[k] + 6 * (2 + k),
                  "%ld batches of products, %ld without pieces", batches, whole[k]);
            graphs = cuda_host_graph_launches() - graphs;
            CHECK(stx_ok(r.x) && graphs > 0, "%s: %ld graphs: %s%s", model_names[want[i].which],
                  graphs, stx_error(r.x), stx_step_replay_status(r.x));
            cuda_nodes_add(&all, k);
            model_free(&r);
        }
        cuda_nodes_check(&all, model_names[want[i].which], 2, want[i].most, *part);
    }
}
#endif
/* A step that takes its tokens from the host is not replayed, and right nevertheless. */
typedef struct fresh_user {
    model *r;
    int n;
} fresh_user;

static void fresh_step(void *user) {
    fresh_user *u = (fresh_user *)user;
    model *r = u->r;
    int32_t *id = ids_of(r->B * r->T + 1, r->V, (size_t)u->n + 1);
    stx_tensor *loss;
    stx_begin(r->x, STX_TRAIN);
    loss = stx_span_loss(r->m, stx_tokens(r->x, id, r->B, r->T),
                         stx_tokens(r->x, id + 1, r->B, r->T), r->s, r->s);
    free(id);
    stx_metric_set(r->x, 0, loss, 1, 0);
    stx_backward(r->x, loss);
    stx_optim_step(r->o, 0.02);
    stx_span_clamp(r->m);
}

static void test_not_repeatable(void) {
    model a, b;
    fresh_user u;
    int n;
    model_make(&a, DROP, STX_CUDA, STX_PREC_F32, 1);
    model_make(&b, DROP, STX_CUDA, STX_PREC_F32, 0);
    for (n = 0; n < 9; n++) {
        u.n = n;
        u.r = &a;
        stx_step_run(a.x, 7, fresh_step, &u);
        u.r = &b;
        stx_step_run(b.x, stx_span_key(b.m, NULL, NULL, b.s, 7), fresh_step, &u);
        CHECK(stx_metric_get(a.x, 0) == stx_metric_get(b.x, 0) && stx_ok(b.x),
              "step %d with tokens from the host: %g and %g (%s)", n, stx_metric_get(a.x, 0),
              stx_metric_get(b.x, 0), stx_error(b.x));
    }
    CHECK(stx_step_index(a.x) == stx_step_index(b.x), "tick %d and %d", (int)stx_step_index(a.x),
          (int)stx_step_index(b.x));
    model_free(&a);
    model_free(&b);
}

/* A step that changes its own data when it is called: it must be called once a
   step, since it takes tokens from the host. */
typedef struct counting {
    model *r;
    int calls;
    double lr;
} counting;

static void counting_step(void *user) {
    counting *u = (counting *)user;
    fresh_user f;
    f.r = u->r;
    f.n = u->calls++;
    fresh_step(&f);
}

static void rate_step(void *user) {
    counting *u = (counting *)user;
    u->r->lr = u->lr;
    model_step(u->r);
}

static void test_keys(void) {
    model a, b;
    counting u, v;
    int n;
    model_make_small(&b, SMALL, STX_CUDA, STX_PREC_F32, 0);
    u.r = &b;
    u.calls = 0;
    u.lr = 0;
    for (n = 0; n < 9; n++) stx_step_run(b.x, 7, counting_step, &u);
    CHECK(u.calls == 9 && stx_ok(b.x), "9 steps called their function %d times: %s", u.calls,
          stx_error(b.x));
    model_free(&b);

    /* learning rates that only the step knows */
    model_make_small(&a, SMALL, STX_CUDA, STX_PREC_F32, 1);
    model_make_small(&b, SMALL, STX_CUDA, STX_PREC_F32, 0);
    u.r = &a;
    v.r = &b;
    for (n = 0; n < 12; n++) {
        u.lr = v.lr = 0.01 * (1 + n);
        stx_step_run(a.x, stx_span_key(a.m, a.in, a.out, a.s, 0), rate_step, &u);
        stx_step_run(b.x, stx_span_key(b.m, b.in, b.out, b.s, 0), rate_step, &v);
        CHECK(stx_metric_get(a.x, 0) == stx_metric_get(b.x, 0),
              "step %d with a separate rate: %g and %g", n, stx_metric_get(a.x, 0),
              stx_metric_get(b.x, 0));
    }
    model_free(&a);
    model_free(&b);

    /* other shapes of tokens, memory full */
    model_make_small(&a, SMALL, STX_CUDA, STX_PREC_F32, 1);
    model_make_small(&b, SMALL, STX_CUDA, STX_PREC_F32, 0);
    for (n = 0; n < 16; n++) {
        stx_ids *keep[4];
        keep[0] = a.in;
        keep[1] = a.out;
        keep[2] = b.in;
        keep[3] = b.out;
        if (n > 10 && n % 2) {
            a.T = b.T = 5;
            a.in = stx_tokens_create(a.x, a.B, 5);
            a.out = stx_tokens_create(a.x, a.B, 5);
            b.in = stx_tokens_create(b.x, b.B, 5);
            b.out = stx_tokens_create(b.x, b.B, 5);
        }
        CHECK(model_run(&a, n, NULL) == model_run(&b, n, NULL),
              "step %d of blocks of %d: %g and %g", n, (int)a.T, a.loss, b.loss);
        a.in = keep[0];
        a.out = keep[1];
        b.in = keep[2];
        b.out = keep[3];
        a.T = b.T = 17;
    }
    model_free(&a);
    model_free(&b);
}

/* stx_step_replay_status: why the last step was not captured, "" if it was captured or
   replayed */
static void empty_step(void *user) {
    stx_begin((stx_ctx *)user, STX_TRAIN);
}

static void test_note(void) {
    static const char differs[] = "not captured: its key is not that of the previous step";
    model a, b;
    fresh_user u;
    int n, keys, captured = 0;
    CHECK(!stx_step_replay_status(NULL)[0], "no context");
    model_make_small(&a, SMALL, STX_CUDA, STX_PREC_F32, 1);
    model_make_small(&b, SMALL, STX_CUDA, STX_PREC_F32, 0);
    for (n = 0; n < 14; n++) {
        model_run(&a, n, NULL);
        model_run(&b, n, NULL);
        CHECK(!stx_step_replay_status(a.x)[0], "step %d, without graphs: \"%s\"", n,
              stx_step_replay_status(a.x));
        captured |= !stx_step_replay_status(b.x)[0];
        CHECK(!n ? !strcmp(stx_step_replay_status(b.x), differs)
                 : !captured || !stx_step_replay_status(b.x)[0],
              "step %d: \"%s\"", n, stx_step_replay_status(b.x));
    }
    CHECK(captured, "after 14 steps: \"%s\"", stx_step_replay_status(b.x));
    model_free(&a);
    model_free(&b);

#ifdef SEQTX_CUDA_HOST /* CUDA refuses: the run goes on, with the same bits, and says why it is slow */
    {
        static const char *name[CUDA_HOST_GRAPH_CALLS] = {"cudaErrorStreamCaptureUnsupported",
                                                          "cudaErrorStreamCaptureInvalidated",
                                                          "cudaErrorMemoryAllocation"};
        double want[20]; /* losses without graphs */
        uint64_t hash = 0, tick = 0;
        int call;
        model_make_small(&a, DROP, STX_CUDA, STX_PREC_F32, 1);
        for (n = 0; n < 20; n++) {
            want[n] = model_run(&a, n, NULL);
            if (n == 13) {
                hash = model_hash(&a);
                tick = stx_step_index(a.x);
            }
        }
        model_free(&a);
        for (call = 0; call < CUDA_HOST_GRAPH_CALLS; call++) {
            long graphs;
            model_make_small(&b, DROP, STX_CUDA, STX_PREC_F32, 0);
            graphs = cuda_host_graph_launches();
            cuda_host_fail_graph(call, 1);
            for (n = 0; n < 14; n++) {
                CHECK(model_run(&b, n, NULL) == want[n], "call %d fails, step %d: %.9g and %.9g",
                      call, n, want[n], b.loss);
                CHECK(stx_ok(b.x), "call %d fails, step %d: %s", call, n, stx_error(b.x));
            }
            graphs = cuda_host_graph_launches() - graphs;
            CHECK(!graphs && model_hash(&b) == hash && stx_step_index(b.x) == tick,
                  "call %d fails: %ld replays", call, graphs);
            CHECK(strstr(stx_step_replay_status(b.x), name[call])
                      && !strncmp(stx_step_replay_status(b.x), "not captured: CUDA ", 19),
                  "call %d fails, and the note is \"%s\"", call, stx_step_replay_status(b.x));
            CHECK(stx_param(stx_params_create(b.x), STX_ZEROS, 0, "new", 3, 0, 0, 0)
                      && !stx_step_replay_status(b.x)[0],
                  "a new parameter: \"%s\"", stx_step_replay_status(b.x));
            graphs = cuda_host_graph_launches();
            for (; n < 20; n++)
                CHECK(model_run(&b, n, NULL) == want[n], "after it, step %d: %.9g and %.9g", n,
                      want[n], b.loss);
            graphs = cuda_host_graph_launches() - graphs;
            CHECK(graphs > 0 && !stx_step_replay_status(b.x)[0], "after it %ld replays, \"%s\"",
                  graphs, stx_step_replay_status(b.x));
            model_free(&b);
        }
        cuda_host_reset_errors();
    }
#endif

    /* tokens from the host in each step */
    model_make_small(&b, DROP, STX_CUDA, STX_PREC_F32, 0);
    u.r = &b;
    for (n = 0; n < 9; n++) {
        u.n = n;
        stx_step_run(b.x, 7, fresh_step, &u);
        CHECK(n < 3 ? !strncmp(stx_step_replay_status(b.x), "not captured: ", 14)
                    : strstr(stx_step_replay_status(b.x), "previous step copied data")
                          && strstr(stx_step_replay_status(b.x), "stx_tokens"),
              "step %d: \"%s\"", n, stx_step_replay_status(b.x));
    }
    model_free(&b);

    /* keys that are new or alternate; then the same key, which is captured at once */
    for (keys = 2; keys <= 40; keys += 19) {
        model_make_small(&b, SMALL, STX_CUDA, STX_PREC_F32, 0);
        for (n = 0; n < 40; n++) {
            stx_step_run(b.x, (uint64_t)(n % keys), empty_step, b.x);
            CHECK(!strcmp(stx_step_replay_status(b.x), differs), "%d keys, step %d: \"%s\"",
                  keys, n, stx_step_replay_status(b.x));
        }
        for (n = 0; n < 3; n++) stx_step_run(b.x, 79, empty_step, b.x);
        CHECK(stx_ok(b.x) && !stx_step_replay_status(b.x)[0], "then one key: \"%s\" %s",
              stx_step_replay_status(b.x), stx_error(b.x));
        model_free(&b);
    }
}

/* Saved on one device, loaded on the other: the next steps are those of the run that
   went on. */
static int save_model(model *r, const char *path) {
    stx_writer *w = stx_writer_create(r->x);
    int ok = stx_params_save(w, r->m->params, "") && stx_optim_save(w, r->o)
             && stx_span_state_save(w, r->s, "memory.") && stx_writer_checksum(w);
    return stx_writer_finish(w, path) && ok;
}

static int load_model(model *r, const char *path) {
    stx_file *f = stx_file_open(r->x, path);
    int ok = f && stx_file_verify(f) && stx_params_load(r->m->params, f, "")
             && stx_optim_load(r->o, f) && stx_span_state_load(r->s, f, "memory.");
    stx_file_close(f);
    return ok;
}

static void test_checkpoint(void) {
    static const int device[4][2] = {{STX_CPU, STX_CUDA},
                                     {STX_CUDA, STX_CPU},
                                     {STX_CUDA, STX_CUDA},
                                     {STX_CPU, STX_CPU}};
    char path[] = "/tmp/seqtx_cuda_XXXXXX";
    int k, n, fd = mkstemp(path), precision;
    if (fd >= 0) close(fd);
    for (precision = 0; precision < 2; precision++)
        for (k = 0; k < 4; k++) {
            model a, b;
            int prec = precision ? STX_PREC_BF16 : STX_PREC_F32,
                same = device[k][0] == device[k][1];
            size_t size = same || precision ? 1 : 2; /* rows and layers */
            model_make_sized(&a, SMALL, device[k][0], device[k][0] ? prec : STX_PREC_F32, 0, size,
                             size);
            model_make_sized(&b, SMALL, device[k][1], device[k][1] ? prec : STX_PREC_F32, 0, size,
                             size);
            for (n = 0; n < 6; n++) model_run(&a, n, NULL);
            CHECK(save_model(&a, path) && load_model(&b, path), "from device %d to %d: %s %s",
                  device[k][0], device[k][1], stx_error(a.x), stx_error(b.x));
            stx_set_step_index(b.x, stx_step_index(a.x));
            b.lr = a.lr;
            CHECK(b.o->step == 6, "%d updates in the file", (int)b.o->step);
            CHECK(model_hash(&a) == model_hash(&b), "from device %d to %d: other parameters",
                  device[k][0], device[k][1]);
            for (n = 6; n < 10; n++) {
                double la = model_run(&a, n, NULL), lb = model_run(&b, n, NULL);
                CHECK(same ? la == lb : fabs(la - lb) <= (precision ? 3e-2 : 1e-4) * la,
                      "from device %d to %d, precision %d, step %d: "
                      "%.8f, going on %.8f",
                      device[k][0], device[k][1], precision, n, lb, la);
            }
            stx_optim_sync(b.o);
            CHECK(b.o->step == 10, "%d updates after going on", (int)b.o->step);
            model_free(&a);
            model_free(&b);
        }
    remove(path);
}

static void test_generation(void) {
    int which;
    for (which = 0; which < MODELS; which++) {
        model a, b;
        stx_span_gen *ga, *gb;
        int32_t *id;
        size_t at;
        model_make(&a, which, STX_CPU, STX_PREC_F32, 0);
        model_make(&b, which, STX_CUDA, STX_PREC_F32, 0);
        ga = stx_span_gen_create(a.m, 2);
        gb = stx_span_gen_create(b.m, 2);
        id = ids_of(2 * 70, a.V, 2);
        for (at = 0; at < 64; at += at ? 1 : 50) {
            const stx_real *la = stx_span_gen_feed(ga, id, at ? 1 : 50),
                           *lb = stx_span_gen_feed(gb, id, at ? 1 : 50);
            double worst = 0;
            size_t i;
            CHECK(la && lb, "%s: %s", model_names[which], stx_error(b.x));
            for (i = 0; la && lb && i < 2 * a.V; i++) {
                double e = fabs((double)la[i] - (double)lb[i]);
                if (!(e <= worst)) worst = e;
            }
            CHECK(worst < 2e-4, "%s, token %d: logits off by %g", model_names[which], (int)at,
                  worst);
        }
        free(id);
        stx_span_gen_free(ga);
        stx_span_gen_free(gb);
        model_free(&a);
        model_free(&b);
    }
}

/* A gradient that is not finite: the device leaves the update out, and the host hears
   of it. */
static void test_skip(void) {
    model r;
    uint64_t before;
    stx_real bad[1] = {0};
    stx_tensor *g;
    int n;
    model_make(&r, SMALL, STX_CUDA, STX_PREC_F32, 0);
    for (n = 0; n < 3; n++) model_run(&r, n, NULL);
    before = model_hash(&r);
    g = stx_params_find(r.m->params, "out_emb.bias");
    bad[0] = (stx_real)NAN;
    stx_upload(r.x, g->grad, bad, 1);
    stx_optim_step(r.o, 0.1);
    CHECK(!stx_optim_sync(r.o) && r.o->skipped == 1 && r.o->step == 3 && model_hash(&r) == before,
          "a NaN in a gradient: skipped %d, "
          "step %d",
          (int)r.o->skipped, (int)r.o->step);
    stx_download(r.x, bad, g->grad, 1);
    CHECK(bad[0] == 0, "the gradient is not zeroed: %g", (double)bad[0]);
    model_run(&r, 3, NULL);
    CHECK(stx_optim_sync(r.o) && r.o->step == 4 && r.o->skipped == 1 && model_hash(&r) != before,
          "the update after it");
    model_free(&r);
}

/* A bad token in a step that is replayed: it is not checked there, so it must not get
   that far. */
static void test_bad_token(void) {
    model r;
    int32_t *id;
    uint64_t before;
    int n;
    model_make(&r, SMALL, STX_CUDA, STX_PREC_F32, 0);
    for (n = 0; n < 8; n++) model_run(&r, n, NULL);
    id = ids_of(r.B * r.T, r.V, 1);
    id[5] = (int32_t)r.V;
    before = model_hash(&r);
    stx_tokens_set(r.x, r.in, id);
    CHECK(!stx_ok(r.x) && strstr(stx_error(r.x), "stx_tokens_set")
              && strstr(stx_error(r.x), "position 5"),
          "token %d of %d: %s", (int)r.V, (int)r.V, stx_error(r.x));
    stx_clear_error(r.x);
    CHECK(model_hash(&r) == before, "a refused token changes the model");
    id[5] = 0;
    stx_tokens_set(r.x, r.in, id);
    CHECK(stx_ok(r.x), "the next tokens: %s", stx_error(r.x));
    free(id);
    model_free(&r);
}

/* A NaN with all bits set, as CUDA's own are, does not become a number in the attention's
   products, and reaches every gradient that it should: no limit on an exponent may hide
   it. In q, k or v of batch row 0, head 0, time 7; on the CPU, with version 0 and with
   the fused kernels. (More may be NaN, of that head: 0 times NaN where a query does not
   see a key of the same tile.) */
static void nan_grads(stx_ctx *x, int which, float *out, float *grads) {
    static const uint32_t bits = 0x7fffffffu;

    enum { N = 2 * 24 * 16 };

    stx_attention_in in;
    stx_attention_desc d;
    stx_tensor *t[3], *y;
    float a[3][N], dy[N];
    size_t i, k;
    test_state = 88172645463325252u;
    for (i = 0; i < N; i++) {
        for (k = 0; k < 3; k++) a[k][i] = (float)test_rand();
        dy[i] = (float)test_rand();
    }
    memcpy(a[which] + 7 * 16 + 3, &bits, 4); /* row 7, head 0, batch row 0 */
    memset(&in, 0, sizeof in);
    memset(&d, 0, sizeof d);
    d.heads = 2;
    stx_begin(x, STX_TRAIN);
    for (k = 0; k < 3; k++) t[k] = stx_variable(x, a[k], 2, 24, 16, 0);
    in.q = t[0];
    in.k = t[1];
    in.v = t[2];
    y = stx_attention(x, &in, &d);
    stx_backward_from(x, y, dy);
    CHECK(y && stx_ok(x), "%s", stx_error(x));
    if (!y || !stx_ok(x)) return;
    stx_get(x, y, out);
    for (k = 0; k < 3; k++) stx_download(x, grads + k * N, t[k]->grad, N);
}

static void test_nan(void) {
    enum { N = 2 * 24 * 16 };

    static float out[N], grads[3 * N];
    int run, which;
    /* the CPU; float with version 0 and 1, bf16 with 0 and 1 */
    for (run = 0; run < 5; run++) {
        static const char *const name[] = {"CPU", "float, fused", "float, version 0", "bf16, fused",
                                           "bf16, version 0"};
        stx_ctx *x = cuda_ctx(run ? STX_CUDA : STX_CPU, run > 2 ? STX_PREC_BF16 : STX_PREC_F32);
        if (run) stx_cuda_attention(x, (run - 1) % 2);
        for (which = 0; which < 3; which++) {
            size_t i, hidden = 0, strays = 0;
            nan_grads(x, which, out, grads);
            for (i = 0; i < 3 * N; i++) {
                size_t t = i / N, row = i % N / 16 % 24;
                int there = i % N / 16 < 24 && i % 16 < 8, must;
                /* dv knows nothing of v */
                must = !there   ? 0
                       : t == 0 ? (which ? row >= 7 : row == 7)
                       : !which ? row <= 7
                                : which == 1 || t == 1;
                hidden += must && !isnan(grads[i]);
                strays += !there && isnan(grads[i]);
            }
            CHECK(!hidden && !strays,
                  "%s, a NaN in %c: %d gradients that hang on it are not NaN, %d of others are",
                  name[run], "qkv"[which], (int)hidden, (int)strays);
            for (i = hidden = strays = 0; i < N; i++) {
                size_t row = i / 16;
                int must = row < 24 && i % 16 < 8 && (which ? row >= 7 : row == 7)
                           && (which < 2 || i % 16 == 3);
                hidden += must && !isnan(out[i]);
                strays += !must && isnan(out[i]);
            }
            CHECK(!hidden && (!strays || which == 2),
                  "%s, a NaN in %c: %d outputs that hang on it are not NaN, %d others are",
                  name[run], "qkv"[which], (int)hidden, (int)strays);
        }
        stx_destroy(x);
    }
}

#ifdef SEQTX_CUDA_HOST
/* >>two GPUs: a context on each in one process. Alternating steps give the bits of one
   run after the other, on the same GPU and on two. */
static void test_two_gpus(void) {
    /* one on each; with dropout, and attention's widest tiles */
    static const int kinds[2] = {DROP, WIDE};
    int half, turn, gpu, n;
    cuda_host_devices(2);
    for (half = 0; half < 2; half++) {
        uint64_t hash[3][2];
        double loss[3][2];
        /* alone on GPU 0, alone on the other, both alternating */
        for (turn = 0; turn < 3; turn++) {
            model r[2];
            for (gpu = 0; gpu < 2; gpu++) {
                model_gpu = turn ? gpu : 0;
                model_make_small(r + gpu, kinds[gpu], STX_CUDA, half ? STX_PREC_BF16 : STX_PREC_F32,
                                 0);
                for (n = 0; turn < 2 && n < 6; n++) loss[turn][gpu] = model_run(r + gpu, n, NULL);
                if (turn < 2) {
                    hash[turn][gpu] = model_hash(r + gpu);
                    model_free(r + gpu);
                }
            }
            if (turn < 2) continue;
            for (n = 0; n < 6; n++)
                for (gpu = 0; gpu < 2; gpu++) loss[turn][gpu] = model_run(r + gpu, n, NULL);
            for (gpu = 1; gpu >= 0; gpu--) {
                hash[turn][gpu] = model_hash(r + gpu);
                CHECK(stx_ok(r[gpu].x), "GPU %d: %s", gpu, stx_error(r[gpu].x));
                model_free(r + gpu);
            }
        }
        for (gpu = 0; gpu < 2; gpu++) {
            CHECK(hash[0][gpu] == hash[1][gpu] && loss[0][gpu] == loss[1][gpu],
                  "%s: alone on GPU %d: other bits than on GPU 0", model_names[kinds[gpu]], gpu);
            CHECK(hash[0][gpu] == hash[2][gpu] && loss[0][gpu] == loss[2][gpu],
                  "%s on GPU %d, alternating with another: other bits than "
                  "alone",
                  model_names[kinds[gpu]], gpu);
        }
    }
    model_gpu = 0;
    cuda_host_devices(1);
    CHECK(cuda_host_bytes_in_use() == 0, "%zu bytes of the devices are left",
          cuda_host_bytes_in_use());
}

/* >>errors: what only the shim can bring about */

static void test_errors(void) {
    stx_ctx *x;
    stx_desc d;
    model r;
    long n, refused = 0;
    size_t bytes;
    memset(&d, 0, sizeof d);
    d.device = STX_CUDA;
    cuda_host_devices(0);
    x = stx_create(&d);
    CHECK(!stx_ok(x) && stx_error_code(x) == STX_ERR_DEVICE
              && strstr(stx_error(x), "no CUDA device") && stx_ctx_desc(x)->device == STX_CPU,
          "no device: %s", stx_error(x));
    stx_destroy(x);
    cuda_host_devices(1);
    d.gpu = 3;
    x = stx_create(&d);
    CHECK(!stx_ok(x) && strstr(stx_error(x), "desc.gpu is 3"), "no fourth device: %s",
          stx_error(x));
    stx_destroy(x);
    d.gpu = 0;
    cuda_host_arch(7, 5);
    x = stx_create(&d);
    CHECK(!stx_ok(x) && stx_error_code(x) == STX_ERR_DEVICE && strstr(stx_error(x), "sm_75")
              && strstr(stx_error(x), "-arch"),
          "an old device: %s", stx_error(x));
    stx_destroy(x);
    cuda_host_arch(9, 0);
    CHECK(cuda_host_bytes_in_use() == 0, "%zu bytes of the device are left after refusals",
          cuda_host_bytes_in_use());

    /* the n-th allocation fails: an error that names the arena, nothing left behind */
    model_make(&r, SMALL, STX_CUDA, STX_PREC_BF16, 0);
    model_run(&r, 0, NULL);
    model_free(&r);
    CHECK(cuda_host_bytes_in_use() == 0, "%zu bytes of the device are left",
          cuda_host_bytes_in_use());
    /* a device of more and more memory, then one whose n-th allocation fails: arenas
       ask again, for less */
    for (n = 1; n < 100; n++) {
        stx_span_desc sd;
        int stopped;
        memset(&sd, 0, sizeof sd);
        sd.vocab = 23;
        sd.layers = 1;
        sd.dim = 32;
        sd.heads = 2;
        sd.span = 40;
        if (n < 60)
            cuda_host_memory((size_t)n * 60000);
        else
            cuda_host_fail_alloc(n - 59);
        memset(&r, 0, sizeof r);
        r.x = stx_create(&d);
        r.B = 2;
        r.T = 8;
        r.V = 23;
        r.lr = 0.1;
        r.m = stx_span_create(r.x, &sd);
        if (r.m) {
            r.o = stx_optim_create(r.m->params, NULL);
            r.s = stx_span_state_create(r.m, r.B);
            r.in = stx_tokens_create(r.x, r.B, r.T);
            r.out = stx_tokens_create(r.x, r.B, r.T);
            if (r.o && r.s && r.in && r.out) model_run(&r, 0, NULL);
        }
        stopped = !stx_ok(r.x);
        if (stopped && !strstr(stx_error(r.x), "stx_create")
            && !strstr(stx_error(r.x), "workspace"))
            CHECK((strstr(stx_error(r.x), "arena") || strstr(stx_error(r.x), "block")
                   || strstr(stx_error(r.x), "scratch"))
                      && strstr(stx_error(r.x), "use"),
                  "allocation %ld fails: %s names neither place nor knob", n, stx_error(r.x));
        if (stopped)
            CHECK(stx_error_code(r.x) == STX_ERR_MEMORY && strlen(stx_error(r.x)) > 20,
                  "allocation %ld fails: code %d, %s", n, stx_error_code(r.x), stx_error(r.x));
        stx_span_state_free(r.s);
        stx_destroy(r.x);
        cuda_host_fail_alloc(0);
        cuda_host_memory((size_t)8 << 30);
        CHECK(cuda_host_bytes_in_use() == 0,
              "allocation %ld fails: %zu bytes of the device are left", n,
              cuda_host_bytes_in_use());
        refused += stopped;
    }
    CHECK(refused > 5, "%ld of 99 runs short of memory were refused", refused);

    /* desc.max_bytes counts the device's memory */
    d.max_bytes = 3 << 20;
    x = stx_create(&d);
    CHECK(stx_block_activations(x, 1 << 18) && !stx_block_activations(x, 1 << 20)
              && strstr(stx_error(x), "max_bytes"),
          "the limit: %s", stx_error(x));
    bytes = stx_bytes(x);
    CHECK(bytes >= 1 << 20 && bytes == cuda_host_bytes_in_use() - 256,
          "%zu bytes in use, %zu by the device's count", bytes, cuda_host_bytes_in_use());
    stx_destroy(x);
    d.max_bytes = 0;

    /* the n-th launch fails: latched, told once with its name, and the host goes on */
    for (n = 1; n < 400; n += 23) {
        stx_span_desc sd;
        memset(&sd, 0, sizeof sd);
        model_make(&r, SMALL, STX_CUDA, STX_PREC_F32, 1);
        cuda_host_fail_launch(n);
        model_run(&r, 0, NULL);
        model_run(&r, 1, NULL);
        if (!stx_ok(r.x)) {
            char text[512];
            snprintf(text, sizeof text, "%s", stx_error(r.x));
            CHECK(stx_error_code(r.x) == STX_ERR_DEVICE && strstr(text, "CUDA")
                      && (!strncmp(text, "stx_", 4) || strstr(text, "copy")
                          || strstr(text, "clearing") || strstr(text, "report")),
                  "launch %ld fails: %s", n, text);
            model_run(&r, 2, NULL);
            CHECK(!strcmp(text, stx_error(r.x)), "the first error stays: %s", stx_error(r.x));
        }
        model_free(&r);
        cuda_host_reset_errors();
    }
    model_make(&r, SMALL, STX_CUDA, STX_PREC_F32, 0);
    CHECK(isfinite(model_run(&r, 0, NULL)), "a new context after it: %s", stx_error(r.x));
    model_free(&r);
    CHECK(cuda_host_bytes_in_use() == 0 && cuda_host_pinned_in_use() == 0,
          "%zu bytes of the device and %zu of pinned memory are left at "
          "the end",
          cuda_host_bytes_in_use(), cuda_host_pinned_in_use());
}
#endif

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(void);
    } parts[] = {
        {"ops", test_ops},
        {"train", test_train},
        {"graph", test_graph},
        {"groups", test_groups},
        {"pieces", test_pieces},
        {"turns", test_turns},
        {"room", test_room},
        {"scalars", test_scalars},
        {"clusters", test_clusters},
        {"not repeatable", test_not_repeatable},
        {"keys", test_keys},
        {"late", test_late},
        {"note", test_note},
        {"checkpoint", test_checkpoint},
        {"generation", test_generation},
        {"skip", test_skip},
        {"bad token", test_bad_token},
        {"nan", test_nan},
        {"words", test_words},
        {"205", test_odd_vocabulary},
#ifdef SEQTX_CUDA_HOST
        {"nodes", test_nodes},
        {"two gpus", test_two_gpus},
        {"errors", test_errors},
#endif
    };
    size_t i;
    if (argc > 1) part = argv[1];
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (i = 0; i < sizeof parts / sizeof *parts; i++)
        if (!*part || !strcmp(part, parts[i].name)) parts[i].run();
#ifdef SEQTX_CUDA_HOST
    CHECK(cuda_host_reports() == 0, "the shim reports %ld violations, the last: %s",
          cuda_host_reports(), cuda_host_last_report());
#endif
    return test_end();
}
