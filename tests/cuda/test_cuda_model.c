/* test_cuda_model.c - tensors and models on a GPU: every op with its gradients against
   the CPU, whole models trained on both, steps replayed as graphs, checkpoints that move
   between devices, and errors. */
#if !defined(_WIN32) && !defined(_POSIX_C_SOURCE)
  #define _POSIX_C_SOURCE 200809L
#endif
#include "../../seqtx_attn_span.h"
#include "../inner/inner.h"
#include "cuda_test.h"
#include <unistd.h>


// >>helpers

static const char *part = ""; /* argv[1]: the only part to run */

/* Returns the largest parameter error of list b on a GPU, relative to the largest
   element of the same parameter in list `a` on the CPU. */
static double params_error(stx_ctx *x, const stx_params *b, const stx_params *a) {
    double worst = 0;
    size_t i;
    for (i = 0; i < a->count; i++)
        raise_worst(&worst, cuda_error(x, b->tensor[i]->data, a->tensor[i]->data,
                                       a->tensor[i]->size, 1e-3));
    return worst;
}

static int32_t *ids_of(size_t n, size_t V, size_t salt) {
    int32_t *id = (int32_t *)malloc(n * sizeof *id);
    size_t i;
    for (i = 0; i < n; i++) id[i] = (int32_t)((i * i / 3 + 7 * i + 5 * salt + (i >> 3) * salt) % V);
    return id;
}


// >>ops
/* Ops that run on both devices. Their outputs and the gradients of all inputs are
   compared. */
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

/* Returns an adaptive softmax or embedding with two clusters: 11 words with 16-element
   embeddings and 8 words with 4-element embeddings. in: the tables, the projection of
   the second cluster, the row of that cluster in the head, and h. */
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
    /* The returned tensor has a higher address than the tensors in `out`; out[0] and
       out[2] share memory. */
    out[0] = stx_slice(x, a, 1, 3);
    out[1] = in[1];
    out[2] = out[0];
    return stx_dropout(x, a, 0.25);
}

static stx_tensor *op_recompute(stx_ctx *x, stx_tensor **in) {
    return stx_add(x, stx_recompute(x, twice, NULL, in, 2, NULL, 0), in[0]);
}

/* Returns a view that has more elements than its input has allocated memory for. */
static stx_tensor *view(stx_ctx *x, void *user, stx_tensor **in, stx_tensor **out) {
    (void)user;
    (void)out;
    stx_scale(x, stx_slice(x, in[0], 0, 1), 2);
    return stx_reshape(x, in[0], in[0]->size, 0, 0, 0);
}

static stx_tensor *op_recomputed_view(stx_ctx *x, stx_tensor **in) {
    stx_tensor *a = stx_scale(x, in[0], 3);
    return stx_recompute(x, view, NULL, &a, 1, NULL, 0);
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

/* A linear layer on cached rows that consist of two parts. In the first part, there are
   unused rows between the streams. */
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

/* A linear layer for three heads in two groups. The results of the groups are
   concatenated. */
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
    {"adaptive_softmax_tokens", op_adaptive_tokens,
     {{11, 16, 0}, {8, 4, 0}, {16, 4, 0}, {1, 16, 0}, {2, 15, 16}, {4, 0, 0}}, 3e-2},
    {"adaptive_input", op_adaptive_input, {{11, 16, 0}, {8, 4, 0}, {16, 4, 0}}, 2e-2},
    {"adaptive_softmax", op_adaptive_softmax,
     {{11, 16, 0}, {8, 4, 0}, {16, 4, 0}, {1, 16, 0}, {2, 15, 16}}, 3e-2},
    {"scale_by", op_scale_by, {{3, 5, 7}, {1, 0, 0}}, 2e-2},
    {"log_softmax", op_log_softmax, {{3, 5, 37}}, 2e-2},
    {"sum", op_sum, {{3, 5, 37}}, 2e-2},
    {"slice_channels", op_slice_channels, {{3, 5, 37}}, 1e-2},
    {"view_rows", op_view_rows, {{11, 7, 0}, {3, 5, 7}}, 2e-2},
    {"view_rows, aligned", op_view_rows, {{40, 64, 0}, {3, 5, 64}}, 2e-2},
    {"linear_memory", op_linear_memory, {{3, 5, 7}, {11, 7, 0}, {11, 0, 0}}, 2e-2},
    {"linear_concat", op_linear_many,
     {{3, 5, 7}, {11, 7, 0}, {4, 7, 0}, {11, 0, 0}, {4, 0, 0}}, 2e-2},
    {"linear_concat, aligned", op_linear_many,
     {{3, 5, 64}, {64, 64, 0}, {128, 64, 0}, {64, 0, 0}, {128, 0, 0}}, 2e-2},
    {"linear_cached", op_linear_past,
     {{3, 5, 7}, {11, 7, 0}, {4, 7, 0}, {11, 0, 0}, {4, 0, 0}}, 2e-2},
    {"linear_cached, aligned", op_linear_past,
     {{3, 5, 64}, {64, 64, 0}, {128, 64, 0}, {64, 0, 0}, {128, 0, 0}}, 2e-2},
    {"linear_heads", op_linear_heads, {{3, 5, 7}, {15, 7, 0}, {15, 7, 0}}, 2e-2},
    {"linear_heads, aligned", op_linear_heads, {{2, 5, 64}, {48, 64, 0}, {48, 64, 0}}, 2e-2},
    {"recompute", op_recompute, {{3, 5, 7}, {3, 5, 7}}, 2e-2},
    {"recompute, a view", op_recomputed_view, {{3, 5, 64}}, 1e-2},
    {"recompute, several results", op_results, {{3, 5, 7}, {3, 5, 7}}, 2e-2},
    {"recompute, several results, aligned", op_results, {{3, 5, 64}, {3, 5, 64}}, 2e-2},
};

/* Runs row o of the op table in x. out[0] receives the value, out[1..] the gradients.
   params: the inputs are f32 parameters with bf16 copies. */
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

static void op_compare(const struct op_row *o, int half, int params) {
    float *data[MAX_IN] = {0}, *expected[MAX_IN + 1] = {0}, *got[MAX_IN + 1] = {0};
    size_t size[MAX_IN + 1] = {0};
    const double tol = half ? o->half : 2e-6;
    int t;
    for (t = 0; t < MAX_IN && o->dim[t][0]; t++) {
        size_t n = o->dim[t][0] * STX_MAX(o->dim[t][1], 1) * STX_MAX(o->dim[t][2], 1);
        data[t] = cuda_random(n, 1.5, 0);
        if (half) cuda_round(data[t], n);
    }
    op_run(o, STX_CPU, STX_PREC_F32, params, data, expected, size);
    op_run(o, STX_CUDA, cuda_precision(half), params, data, got, size);
    for (t = 0; t <= MAX_IN; t++) {
        double worst, top;
        if (!expected[t] || !got[t]) continue;
        top = cuda_largest(expected[t], size[t], 1e-3);
        worst = max_difference(expected[t], got[t], size[t]);
        CHECK(worst <= tol * top, "%s, bf16 %d, %s, %s %d: error %g of %g", o->name, half,
              params ? "parameters" : "variables", t ? "gradient" : "value", t, worst, top);
        free(expected[t]);
        free(got[t]);
    }
    for (t = 0; t < MAX_IN; t++) free(data[t]);
}

static void test_ops(void) {
    size_t k;
    int half, params;
    for (k = 0; k < COUNT(ops); k++)
        for (half = 0; half < 2; half++)
            for (params = 0; params < 2; params++) op_compare(&ops[k], half, params);
}



// >>models

typedef struct model {
    stx_ctx *x;
    stx_span *m;
    stx_optim *o;
    stx_span_state *s;
    stx_ids *in, *out;
    size_t B, T, V;
    double lr, loss;
    long calls;   /* number of calls of the step's function */
    uint64_t key; /* the step key of the last step */
} model;

enum { SMALL, DROP, PERS, IO, LITERAL, RECOMPUTE, WIDE, FAIRSEQ, GROUPED, MUON, FROZEN, MODELS };

static const char *const model_names[MODELS] = {"adaptive span",  "dropout",
                                                "all-attention",  "adaptive input and output",
                                                "literal",        "recomputation",
                                                "wide",           "fairseq",
                                                "groups of heads", "Muon",
                                                "frozen parameters"};

static int model_gpu;      /* the GPU on which later contexts are created */
static size_t model_vocab; /* 0: the model's default */

/* The optimiser, clipping limit and learning rate of each model */
static const struct {
    int optim;
    double clip, lr;
} training[MODELS] = {
    {STX_ADAGRAD, 0.1, 0.02},  /* SMALL */
    {STX_ADAM, 0.1, 0.003},    /* DROP */
    {STX_SGD, 1, 0.05},        /* PERS */
    {STX_ADAGRAD, 0.1, 0.002}, /* IO */
    {STX_ADAGRAD, 0.1, 0.02},  /* LITERAL */
    {STX_RADAM, 0.1, 0.02},    /* RECOMPUTE */
    {STX_SGD, 1, 0.05},        /* WIDE */
    {STX_ADAGRAD, 0.1, 0.02},  /* FAIRSEQ */
    {STX_ADAGRAD, 0.1, 0.02},  /* GROUPED */
    {STX_MUON, 0.1, 0.003},    /* MUON */
    {STX_ADAMW, 0.1, 0.003}    /* FROZEN */
};

static void model_options(stx_span_desc *d, int which) {
    switch (which) {
    case DROP:
        d->dropout = 0.2;
        d->emb_dropout = 0.1;
        break;
    case PERS: d->pers = 9; break;
    case IO:
        d->adapt_io = 1;
        d->cutoff[0] = 11;
        d->cutoffs = 1;
        d->adapt_io_tied = 1;
        d->divval = 2;
        break;
    case LITERAL: d->literal = STX_SPAN_LITERAL; break;
    case FAIRSEQ:
        d->no_renorm = d->span_per_layer = d->fairseq_init = 1;
        d->ramp = 7.5;
        d->dropout = 0.1;
        break;
    case RECOMPUTE:
    case FROZEN:
        d->recompute_layers = SIZE_MAX;
        d->dropout = 0.2;
        break;
    case WIDE:
        d->dim = 128;
        d->span = 96;
        break;
    case GROUPED:
        d->heads = 4;
        d->span = 800;
        break;
    }
}

static void model_make_sized(model *r, int which, int device, int precision, int no_graph, size_t B,
                             size_t layers) {
    static const stx_real grouped_z[4] = {0.02f, 0.95f, 0.03f, 0.3f};
    size_t l;
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
    r->T = which == GROUPED ? 100 : 17;
    r->V = which == IO ? 41 : 23;
    if (model_vocab) r->V = model_vocab;
    d.vocab = r->V;
    d.layers = layers;
    d.dim = 32;
    d.heads = 2;
    d.inner = 48;
    d.span = 40;
    d.adapt_span = 1;
    d.ramp = 8;
    d.span_init = 0.3;
    d.span_loss = 1e-4;
    model_options(&d, which);
    r->m = stx_span_create(r->x, &d);
    /* the windows of the four heads are 800, 256, 64 and 64 */
    for (l = 0; which == GROUPED && r->m && l < d.layers; l++)
        stx_set(r->x, r->m->layer[l].z, grouped_z);
    od.kind = training[which].optim;
    od.clip = training[which].clip;
    od.momentum = 0.9;
    od.weight_decay = which == RECOMPUTE || which == MUON || which == FROZEN ? 0.1 : 0;
    od.radam_skip = 1;
    if (which == FROZEN && r->m) {
        const stx_param_rule freeze = {1, 0, 0}, slow = {0, 0.3, -1};
        stx_params_set_rule(r->m->params, "in_emb.*,layers.0.*,*fc1.weight,*.wk", &freeze);
        stx_params_set_rule(r->m->params, "key_pe,*bias", &slow);
    }
    r->o = stx_optim_create(r->m->params, &od);
    r->s = stx_span_state_create(r->m, r->B);
    r->in = stx_tokens_create(r->x, r->B, r->T);
    r->out = stx_tokens_create(r->x, r->B, r->T);
    r->lr = training[which].lr;
    CHECK(stx_ok(r->x), "%s, device %d: %s", model_names[which], device, stx_error(r->x));
}

static void model_make(model *r, int which, int device, int precision, int no_graph) {
    model_make_sized(r, which, device, precision, no_graph, 2, 2);
}

/* Creates a model for tests that do not depend on the architecture: replays, status
   texts, files. */
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

/* The host's copy of the spans must equal the device's, even if nothing else was
   requested after the step. */
static void spans_current(model *r, const char *when) {
    size_t l, h;
    for (l = 0; l < r->m->desc.layers; l++)
        for (h = 0; h < r->m->desc.heads; h++) {
            stx_real z[8];
            double span = stx_span_head_span(r->m, l, h);
            stx_get(r->x, r->m->layer[l].z, z);
            if (r->m->desc.span_per_layer) z[h] = z[0];
            CHECK(span == (double)z[h] * (double)r->m->desc.span,
                  "%s: the host's span of layer %d, head %d is %g, expected %g", when, (int)l,
                  (int)h, span, (double)z[h] * (double)r->m->desc.span);
        }
}

/* Runs step n and returns its loss. The host may wait for the device outside of
   stx_step_run; waits inside it are added to *syncs. */
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
    return cuda_hash_params(r->x, r->m->params, 1);
}

static void model_free(model *r) {
    stx_span_state_free(r->s);
    stx_destroy(r->x);
}

enum { STEPS = 12 };

/* Trains one model on the CPU and on a GPU. */
static void train_case(int which, int half) {
    const char *name = model_names[which];
    const int replayed = which % 2;
    const size_t B = which == GROUPED ? 1 : 2; /* its steps are long */
    double worst = 0, tol = which == LITERAL ? 2e-4 : 1e-4;
    long syncs = 0, replays;
    model a, b;
    int n;
    if (half) tol = 3e-2;
    model_make_sized(&a, which, STX_CPU, STX_PREC_F32, 0, B, 2);
    model_make_sized(&b, which, STX_CUDA, cuda_precision(half), !replayed, B, 2);
    replays = cuda_replays();
    for (n = 0; n < STEPS; n++) {
        /* from step 9 on, the memories have their final sizes */
        double la = model_run(&a, n, NULL), lb = model_run(&b, n, n > 8 ? &syncs : NULL);
        CHECK(stx_ok(b.x), "%s, step %d: %s", name, n, stx_error(b.x));
        CHECK(fabs(la - lb) <= tol * la,
              "%s, bf16 %d, step %d: loss %.7f on the CPU, %.7f on the GPU", name, half, n, la, lb);
    }
    CHECK(a.loss < (which == IO ? 20 : 3.5) && a.loss > 0.1, "%s: the loss is %g", name, a.loss);
    if (!half) worst = params_error(b.x, b.m->params, a.m->params);
    /* Adagrad and Adam divide by the magnitude of the gradient, which may be only a
       rounding error. */
    CHECK(worst <= (a.o->desc.kind == STX_SGD ? 1e-4 : 1e-2),
          "%s: after %d steps a parameter has an error of %g", name, STEPS, worst);
    CHECK(stx_optim_sync(b.o) && stx_optim_sync(a.o) && a.o->step == STEPS && b.o->step == STEPS
              && CLOSE(b.o->grad_norm, a.o->grad_norm, half ? 0.1 : 1e-3),
          "%s: %d updates, norm %g; on the CPU %g", name, (int)b.o->step, b.o->grad_norm,
          a.o->grad_norm);
    CHECK(syncs == 0, "%s: the host waited %ld times inside steps", name, syncs);
    replays = cuda_replays() - replays;
    if (CUDA_ON_HOST)
        CHECK(which == IO || !replayed == !replays, "%s: %ld replays of %d steps", name, replays,
              (int)STEPS);
    model_free(&a);
    model_free(&b);
}

static void test_train(void) {
    int which, half;
    for (half = 0; half < 2; half++)
        for (which = 0; which < MODELS; which++) train_case(which, half);
}


// >>replays

/* Runs an evaluation between replays, in the same arenas. */
static void evaluate(model *r) {
    int32_t *id = ids_of(5, r->V, 9);
    stx_ids *in, *out;
    stx_begin(r->x, STX_EVAL);
    in = stx_tokens(r->x, id, 1, 4);
    out = stx_tokens(r->x, id + 1, 1, 4);
    CHECK(isfinite(stx_item(r->x, stx_span_loss(r->m, in, out, NULL, NULL))),
          "an evaluation between replays");
    free(id);
}

/* A replayed step must be bit-identical to a launched step, including dropout and the
   optimiser's counters. */
static void test_graph(void) {
    static const int models[] = {SMALL, DROP, PERS, RECOMPUTE, IO, MUON, FROZEN};
    size_t k;
    int n;
    for (k = 0; k < COUNT(models); k++) {
        const int which = models[k];
        /* batch size, and number of layers */
        const size_t size = which == RECOMPUTE || which == FROZEN ? 2 : 1;
        long replays = cuda_replays();
        model a, b;
        model_make_sized(&a, which, STX_CUDA, STX_PREC_F32, 1, size, size);
        model_make_sized(&b, which, STX_CUDA, STX_PREC_F32, 0, size, size);
        for (n = 0; n < 14; n++) {
            double la = model_run(&a, n, NULL), lb = model_run(&b, n, NULL);
            CHECK(la == lb, "%s, step %d: %.9g launched, %.9g replayed", model_names[which], n, la,
                  lb);
            if (n == 9) evaluate(&b);
        }
        CHECK(model_hash(&a) == model_hash(&b), "%s: replays give other parameters",
              model_names[which]);
        CHECK(stx_step_index(a.x) == stx_step_index(b.x),
              "the random stream: step index %d launched, %d replayed", (int)stx_step_index(a.x),
              (int)stx_step_index(b.x));
        replays = cuda_replays() - replays;
        if (CUDA_ON_HOST)
            CHECK(replays >= (which == IO ? 0 : 5), "%s: %ld replays of 14 steps",
                  model_names[which], replays);
        model_free(&a);
        model_free(&b);
    }
}

/* Returns the number of groups into which the library divides the heads of layer 0. */

static size_t groups_now(model *r) {
    stx_head_groups g;
    size_t need[4], h, L = r->m->desc.span;
    for (h = 0; h < 4; h++)
        need[h] = STX_MIN((size_t)ceil(stx_span_head_span(r->m, 0, h) + r->m->desc.ramp), L) + 1;
    stx_head_groups_choose(need, 4, STX_MIN(stx_span_window(r->m, 0), r->s->memory->layer[0].count),
                           &g);
    return g.count;
}

/* Checks that two memories hold the same rows. */
static void same_memory(stx_memory *a, stx_memory *b, const char *what) {
    size_t l;
    for (l = 0; l < a->desc.layers; l++) {
        size_t n = a->B * a->layer[l].count * a->layer[l].width;
        stx_real *v = (stx_real *)calloc(2 * n, sizeof *v);
        CHECK(n && a->layer[l].count == b->layer[l].count && stx_memory_get(a, l, v)
              && stx_memory_get(b, l, v + n) && !memcmp(v, v + n, n * sizeof *v),
              "%s: other rows in the memory of layer %zu", what, l);
        free(v);
    }
}

/* Replays steps while the head groups change. The memories must be bit-identical to
   those of a run without graphs. */
static void test_groups(void) {
    enum { PHASES = 6, EACH = 6, S = 800 };

    /* The spans of the heads in each phase. The heads form three groups; three other
       groups; a single group; the first three again; then two groups and a single one,
       with a shorter window that needs no new rows. */
    static const stx_real z[PHASES][4] = {{0.02f, 0.95f, 0.03f, 0.3f},  {0.95f, 0.5f, 0.03f, 0.5f},
                                          {0.95f, 0.95f, 0.95f, 0.95f}, {0.02f, 0.95f, 0.03f, 0.3f},
                                          {0.4f, 0.03f, 0.2f, 0.03f},   {0.4f, 0.38f, 0.4f, 0.38f}};
    static const size_t groups[PHASES] = {3, 3, 1, 3, 2, 1};
    model a, b;
    stx_real *rows;
    uint64_t key = 0;
    int phase, n, step = 0;
    model_make_sized(&a, GROUPED, STX_CUDA, STX_PREC_F32, 1, 1, 1);
    model_make_sized(&b, GROUPED, STX_CUDA, STX_PREC_F32, 0, 1, 1);
    a.T = b.T = 24;
    a.in = stx_tokens_create(a.x, 1, 24);
    a.out = stx_tokens_create(a.x, 1, 24);
    b.in = stx_tokens_create(b.x, 1, 24);
    b.out = stx_tokens_create(b.x, 1, 24);
    rows = cuda_random(S * 32, 1, 0); /* enough rows to fill the memories */
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
        CHECK(key != b.key, "phase %d has the key of the previous one", phase);
        key = b.key;
        CHECK(model_hash(&a) == model_hash(&b), "phase %d: replays give other parameters", phase);
        same_memory(a.s->memory, b.s->memory, "groups of heads");
#ifdef SEQTX_CUDA_HOST
        calls = b.calls - calls;
        graphs = cuda_host_graph_launches() - graphs;
        /* A captured step calls the step's function and is then launched. When the
           groups of the first phase return, the graph of that phase may be replayed. */
        CHECK(calls + graphs > EACH || phase == 3,
              "phase %d: no step was captured, %ld calls, %ld graphs", phase, calls, graphs);
        CHECK(calls < EACH && graphs, "phase %d: no step was replayed, %ld calls, %ld graphs",
              phase, calls, graphs);
#endif
    }
    model_free(&a);
    model_free(&b);
}

/* Returns the number of batched matmuls so far. A real GPU does not count them; the
   result is then 0. */
static long batches_so_far(void) {
#ifdef SEQTX_CUDA_HOST
    return cuda_host_batches();
#else
    return 0;
#endif
}

/* Replays steps in which all weight gradients are split along K and their sums are
   deferred to the end of the backward pass. */
static void pieces_case(int which, int half) {
    const char *name = model_names[which];
    /* numbers of batched matmuls: `batches` in the last launched step, `most` in the
       captured step */
    long batches = 0, most = 0, replays = cuda_replays(), before;
    model a, b;
    int n;
    model_make_sized(&a, which, STX_CUDA, cuda_precision(half), 1, 2, 1);
    model_make_sized(&b, which, STX_CUDA, cuda_precision(half), 0, 2, 1);
    inner_pieces(a.x, 2);
    inner_pieces(b.x, 2);
    for (n = 0; n < 12; n++) {
        double la, lb;
        before = batches_so_far();
        la = model_run(&a, n, NULL);
        batches = batches_so_far() - before;
        before = batches_so_far();
        lb = model_run(&b, n, NULL);
        most = STX_MAX(most, batches_so_far() - before);
        CHECK(la == lb && stx_ok(b.x), "%s, split K, step %d: %.9g launched, %.9g replayed: %s",
              name, n, la, lb, stx_error(b.x));
    }
    CHECK(model_hash(&a) == model_hash(&b), "%s, split K: replays give other parameters", name);
    same_memory(a.s->memory, b.s->memory, "split K");
    replays = cuda_replays() - replays;
    if (CUDA_ON_HOST) {
        CHECK(replays > 4 && b.calls < 12, "%ld replays of 12 steps, %ld calls", replays, b.calls);
        /* Without splitting, there is one batched matmul fewer per weight. */
        before = batches_so_far();
        inner_pieces(a.x, 0);
        model_run(&a, n, NULL);
        before = batches_so_far() - before;
        CHECK(batches >= before + 4 && most >= batches,
              "%ld batches of matmuls launched, %ld captured, %ld without splitting", batches, most,
              before);
    }
    model_free(&a);
    model_free(&b);
}

static void test_pieces(void) {
    int half;
    for (half = 0; half < 2; half++) pieces_case(SMALL, half);
    for (half = 0; half < 2; half++) pieces_case(PERS, half);
}

/* A step that reads one memory and writes another: from a to b and back, or through
   three memories. A replayed step must be bit-identical to a launched one, and must
   have the same losses as a step that uses a single memory throughout. */
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
    model_make_sized(&u->r, which, STX_CUDA, precision, no_graph, 1, 2);
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
    } cases[] = {{SMALL, STX_PREC_F32, 2, 2},
                 {DROP, STX_PREC_BF16, 3, 3},
                 {SMALL, STX_PREC_F32, 2, 4}};

    enum { ALL = 12 };

    size_t i;
    for (i = 0; i < COUNT(cases); i++) {
        turning a, b, c;
        int n, k;
#ifdef SEQTX_CUDA_HOST
        long graphs = cuda_host_graph_launches(), allocs = 0;
#endif
        turning_make(&a, cases[i].which, cases[i].precision, 1, cases[i].states, cases[i].turns);
        turning_make(&b, cases[i].which, cases[i].precision, 0, cases[i].states, cases[i].turns);
        /* the reference: a single memory */
        turning_make(&c, cases[i].which, cases[i].precision, 1, 1, cases[i].turns);
        for (n = 0; n < ALL; n++) {
            double la[4], lb[4], lc[4];
#ifdef SEQTX_CUDA_HOST
            if (n == 7) allocs = cuda_host_allocs();
#endif
            turning_run(&a, n, la);
            turning_run(&b, n, lb);
            turning_run(&c, n, lc);
            for (k = 0; k < cases[i].turns; k++) {
                const double tol = cases[i].precision == STX_PREC_BF16 ? 1e-2 : 1e-5;
                CHECK(la[k] == lb[k] && stx_ok(b.r.x),
                      "case %d, step %d, turn %d: %.9g launched, %.9g replayed: %s", (int)i, n, k,
                      la[k], lb[k], stx_error(b.r.x));
                CHECK(fabs(la[k] - lc[k]) <= tol * la[k],
                      "case %d, step %d, turn %d: %.9g, in one memory %.9g", (int)i, n, k, la[k],
                      lc[k]);
            }
        }
        CHECK(model_hash(&a.r) == model_hash(&b.r), "case %d: replays give other parameters",
              (int)i);
        CHECK(stx_step_index(a.r.x) == stx_step_index(b.r.x), "step index %d launched, %d replayed",
              (int)stx_step_index(a.r.x), (int)stx_step_index(b.r.x));
        for (k = 0; k < cases[i].states; k++) same_memory(a.s[k]->memory, b.s[k]->memory, "turns");
#ifdef SEQTX_CUDA_HOST
        graphs = cuda_host_graph_launches() - graphs;
        allocs = cuda_host_allocs() - allocs;
        CHECK(graphs > 3 && b.r.calls < ALL && !allocs && !*stx_step_replay_status(b.r.x),
              "case %d: %ld replays, %ld of %d steps called their function, %ld allocations: %s",
              (int)i, graphs, b.r.calls, (int)ALL, allocs, stx_step_replay_status(b.r.x));
#endif
        turning_free(&a);
        turning_free(&b);
        turning_free(&c);
    }
}

/* Tests memories with spare capacity. Ops either read the rows of a memory in place or
   copy them. From step 6 on, the rows must be at the same addresses in every step. */
static void test_padding(void) {
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
        CHECK(n < 6 || key == stx_memory_key(s, 1), "step %d starts %d and %d rows later", n,
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

/* A step with scalars, which may be set between replays. Constants created after the
   first replays must not stop the replays. The results must be bit-identical to those
   without graphs. */
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

/* The loss of a step is the mean square of softmax(scale table w^T). */
static void scaled_step(void *user) {
    scaled *u = (scaled *)user;
    stx_tensor *y;
    stx_begin(u->x, STX_TRAIN);
    if (u->inside) stx_scalar_set(u->x, u->scale, u->value);
    y = stx_linear(u->x, u->table, stx_params_find(u->p, "w"), NULL, STX_ACT_NONE);
    y = stx_softmax(u->x, stx_scale_by(u->x, y, u->scale));
    y = stx_mean(u->x, stx_mul(u->x, y, y));
    stx_metric_set(u->x, 0, y, 1, 0);
    stx_backward(u->x, y);
    stx_optim_step(u->o, 0.01);
}

static void scalars_case(int precision, int inside) {
    const char *when = inside ? "inside" : "between";
    scaled a, b;
    long replays = cuda_replays();
    double last = -1;
    int n;
    scaled_make(&a, precision, 1);
    scaled_make(&b, precision, 0);
    a.inside = b.inside = inside;
    for (n = 0; n < 12; n++) {
        double la, lb;
        a.value = b.value = 0.5 + 0.25 * n;
        if (!inside) {
            stx_scalar_set(a.x, a.scale, a.value);
            stx_scalar_set(b.x, b.scale, b.value);
        }
        if (n == 6) {
            stx_real one = 1;
            CHECK(stx_constant_create(b.x, &one, 1, 0, 0, 0) && stx_scalar_create(b.x, 2), "%s",
                  stx_error(b.x));
        }
        stx_step_run(a.x, 3, scaled_step, &a);
        stx_step_run(b.x, 3, scaled_step, &b);
        la = stx_metric_get(a.x, 0);
        lb = stx_metric_get(b.x, 0);
        CHECK(la == lb && la > 0 && la != last && stx_ok(b.x),
              "scalar set %s steps, step %d: %.9g launched, %.9g replayed: %s", when, n, la, lb,
              stx_error(b.x));
        last = la;
    }
    replays = cuda_replays() - replays;
    if (CUDA_ON_HOST)
        CHECK(inside ? replays == 0 : replays >= 9, "scalar set %s steps: %ld replays of 12 steps",
              when, replays);
    CHECK(inside == (strstr(stx_step_replay_status(b.x), "set a scalar") != NULL), "status: %s",
          stx_step_replay_status(b.x));
    stx_destroy(a.x);
    stx_destroy(b.x);
}

static void test_scalars(void) {
    int precision, inside;
    for (precision = 0; precision < 2; precision++)
        for (inside = 0; inside < 2; inside++) scalars_case(precision, inside);
}

/* A model with adaptive input and softmax, and with ignored rows. Steps with equal
   cluster sizes are replayed and must be bit-identical to launched steps. blind: the
   key does not contain the sizes, so a replayed step must not update anything if its
   ids do not match the sizes. */
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
    if (!no_graph) { /* Storing the gradients in one block must not change the bits. */
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

/* Returns the id at position k of a batch. The first `many` ids are from cluster 1, the
   next 8 from cluster 2, and the rest from cluster 0. */
static int32_t clustered_id(int i, int n, int k, int many) {
    if (k < many) return 11 + (i + n) % 14;
    if (k < many + 8) return 25 + (i * n) % 16;
    return (i + n) % 11;
}

/* Like clustered_id, but the first 10 positions are ignored. */
static int32_t clustered_target(int i, int n, int k, int many) {
    if (k < 10) return 3;
    if (k < many) return 11 + (i * n) % 14;
    if (k < many + 6) return 25 + (i + n) % 16;
    return 4 + (i + n) % 7;
}

/* Runs step n. All steps of one kind have the same number of words per cluster, in
   different orders. */
static int clustered_run(clustered *u, int n, int kind, int blind) {
    int32_t id[CB * CT], next[CB * CT];
    uint64_t key = 5;
    int i;
    for (i = 0; i < CB * CT; i++) {
        int k = (i * 7 + 3 * n) % (CB * CT), many = kind ? 40 : 20;
        id[i] = clustered_id(i, n, k, many);
        next[i] = clustered_target(i, n, k, many);
    }
    stx_tokens_set(u->x, u->ids, id);
    stx_tokens_set(u->x, u->targets, next);
    if (!blind)
        key = stx_adaptive_key(stx_adaptive_key(key, &u->in, u->ids, 0, NULL), &u->out, u->targets,
                               1, &u->how);
    return stx_step_run(u->x, key, clustered_step, u);
}

/* Runs steps whose key does not contain the cluster sizes. Step 4 has different cluster
   sizes from the captured step and must not update anything. */
static void clustered_blind(clustered *b) {
    const stx_tensor *t = b->in.table[1];
    int n;
    for (n = 0; n < 6; n++) {
        uint64_t h = cuda_hash(b->x, t->data, t->size, 1);
        clustered_run(b, n, n == 4, 1);
        CHECK(stx_ok(b->x) && isnan(stx_metric_get(b->x, 0)) == (n == 4),
              "clusters that do not fit: loss %g", stx_metric_get(b->x, 0));
        CHECK((cuda_hash(b->x, t->data, t->size, 1) == h) == (n == 4),
              "clusters that do not fit: updates in step %d", n);
    }
    CHECK(stx_optim_sync(b->o) && b->o->skipped == 1 && b->o->step == 21, "%d updates, %d skipped",
          (int)b->o->step, (int)b->o->skipped);
}

static void test_clusters(void) {
    int precision, n;
    for (precision = 0; precision < 2; precision++) {
        clustered a, b;
        long replays = cuda_replays();
        size_t i;
        clustered_make(&a, precision, 1);
        clustered_make(&b, precision, 0);
        for (n = 0; n < 16; n++) {
            clustered_run(&a, n, n % 8 >= 5, 0);
            clustered_run(&b, n, n % 8 >= 5, 0);
            CHECK(stx_metric_get(a.x, 0) == stx_metric_get(b.x, 0)
                      && stx_metric_get(a.x, 1) == stx_metric_get(b.x, 1)
                      && stx_metric_get(a.x, 1) > stx_metric_get(a.x, 0) && stx_ok(b.x),
                  "step %d: %.9g launched, %.9g replayed: %s", n, stx_metric_get(a.x, 0),
                  stx_metric_get(b.x, 0), stx_error(b.x));
        }
        replays = cuda_replays() - replays;
        if (CUDA_ON_HOST) CHECK(replays >= 10, "clusters: %ld replays of 16 steps", replays);
        for (i = 0; i < a.p->count; i++)
            CHECK(cuda_hash(a.x, a.p->tensor[i]->data, a.p->tensor[i]->size, 1)
                      == cuda_hash(b.x, b.p->tensor[i]->data, b.p->tensor[i]->size, 1),
                  "%s: replays give other bits", a.p->name[i]);
        CHECK(stx_optim_sync(b.o) && b.o->step == 16, "%d updates", (int)b.o->step);
        clustered_blind(&b);
        stx_destroy(a.x);
        stx_destroy(b.x);
    }
}


// >>deferred sums

/* Tests row sums that the backward pass defers: for parameters that several ops use,
   for more parameters than a table holds, for a parameter that is both gain and shift,
   and for a non-parameter bias whose gradient is read before the backward pass ends. */
enum { LATE_N = 70, LATE_C = 36, LATE_OPS = 17 };

/* Computes layer i: one or two linear layers and a normalisation. */
static stx_tensor *late_layer(stx_ctx *x, stx_tensor *h, size_t i, stx_tensor *w, stx_tensor *b,
                              stx_tensor *gain, stx_tensor *both, stx_tensor *own[][2]) {
    stx_tensor *f;
    f = stx_linear(x, h, w, i % 3 ? b : own[i][0], i % 2 ? STX_ACT_RELU : STX_ACT_TANH);
    /* The bias is not a parameter. */
    if (i % 4 == 3) f = stx_linear(x, f, w, stx_scale(x, b, 0.7), STX_ACT_NONE);
    if (i % 5 == 4) return stx_layernorm(x, f, both, both, 0);
    if (i % 5 == 3) return stx_residual_norm(x, h, f, 0, gain, b, 0);
    return stx_residual_norm_bias(x, h, f, i % 2 ? b : own[i][0], 0.1, own[i][1],
                                  i % 3 ? own[i][0] : own[(i + 1) % LATE_OPS][0], 0);
}


static void late_grads(int device, int precision, stx_real *got) {
    stx_ctx *x = cuda_ctx(device, precision);
    stx_params *p = stx_params_create(x);
    float *a = cuda_random(LATE_N * LATE_C, 1, 0);
    stx_tensor *w = stx_param(p, STX_NORMAL, 0.1, "w", LATE_C, LATE_C, 0, 0),
               *b = stx_param(p, STX_NORMAL, 0.1, "b", LATE_C, 0, 0, 0);
    stx_tensor *gain = stx_param(p, STX_CONSTANT, 1, "gain", LATE_C, 0, 0, 0);
    stx_tensor *both = stx_param(p, STX_CONSTANT, 0.5, "both", LATE_C, 0, 0, 0);
    stx_tensor *own[LATE_OPS][2], *h;
    size_t i, k;
    char name[2][24];
    for (i = 0; i < LATE_OPS; i++)
        for (k = 0; k < 2; k++) {
            snprintf(name[k], sizeof name[k], "own.%d.%d", (int)i, (int)k);
            own[i][k] = stx_param(p, STX_CONSTANT, (double)k, name[k], LATE_C, 0, 0, 0);
        }
    stx_begin(x, STX_TRAIN);
    h = stx_input(x, a, LATE_N, LATE_C, 0, 0);
    for (i = 0; i < LATE_OPS; i++) h = late_layer(x, h, i, w, b, gain, both, own);
    stx_backward(x, stx_mean(x, stx_mul(x, h, h)));
    for (i = 0; i < p->count; i++) {
        stx_get_grad(x, p->tensor[i], got);
        got += p->tensor[i]->size;
    }
    CHECK(stx_ok(x), "deferred sums: %s", stx_error(x));
    free(a);
    stx_destroy(x);
}

static void test_late(void) {
    enum { ALL = LATE_C * LATE_C + (3 + 2 * LATE_OPS) * LATE_C };

    static stx_real c[ALL], g[ALL];
    int half;
    for (half = 0; half < 2; half++) {
        double worst, top;
        uint64_t state = test_state;
        late_grads(STX_CPU, STX_PREC_F32, c);
        test_state = state;
        late_grads(STX_CUDA, cuda_precision(half), g);
        top = cuda_largest(c, ALL, 0);
        worst = max_difference(c, g, ALL);
        CHECK(worst <= (half ? 0.1 : 1e-4) * top && top > 0,
              "deferred sums, bf16 %d: error %g of %g", half, worst, top);
    }
}


// >>padded logits

/* A model with a vocabulary of each kind, with row lengths that are not multiples of 8.
   Gradients, logits and log p are compared between the devices. Updates must not change
   the padding of a table. */
typedef struct worded {
    stx_ctx *x;
    stx_params *p;
    stx_vocab_io *w;
    stx_optim *o;
} worded;

enum { WORDS_B = 3, WORDS_T = 7, WORDS_N = 21, WORDS_V = 205, WORDS_D = 32 };

/* Kinds of vocabulary */
enum { WORDS_PLAIN, WORDS_TIED, WORDS_ADAPTIVE, WORDS_SHARED_MAJOR, WORDS_SHARED, WORDS_KINDS };

/* Returns the number of padding elements that parameter i of WORDS_PLAIN has on a GPU.
   The parameters are the input table, the output table and the bias. */
static size_t worded_padding(size_t i) {
    if (i == 0) return 0;
    return i == 1 ? 51 * WORDS_D : 51;
}

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
    d.out = STX_VOCAB_ADAPTIVE;
    if (kind == WORDS_PLAIN) d.out = STX_VOCAB_PLAIN;
    if (kind == WORDS_TIED) d.out = STX_VOCAB_TIED;
    if (kind >= WORDS_ADAPTIVE) {
        d.in = STX_VOCAB_ADAPTIVE;
        d.cutoff[0] = 53;
        d.cutoff[1] = 112;
        d.cutoffs = 2;
        d.divval = 2;
    }
    if (kind >= WORDS_SHARED_MAJOR) {
        d.share_tables = 1;
        d.cluster_major = kind == WORDS_SHARED_MAJOR;
    }
    u->w = stx_vocab_io_create(u->p, &d);
    od.kind = STX_ADAMW;
    od.weight_decay = 0.1;
    od.clip = 0.5;
    u->o = stx_optim_create(u->p, &od);
    CHECK(stx_ok(u->x), "words %d, device %d: %s", kind, device, stx_error(u->x));
    for (i = 0; i < u->p->count; i++)
        CHECK(device == STX_CPU || kind != WORDS_PLAIN
                  || u->p->tensor[i]->padding == worded_padding(i),
              "padding of %s: %zu", u->p->name[i], u->p->tensor[i]->padding);
}

/* Computes the loss in one of three ways: by the model (0), with weights and an ignored
   id (1), or from the public logits (2). */
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
    double worst, top;
    if (grads) {
        stx_get_grad(a->x, s, c);
        stx_get_grad(b->x, t, g);
    } else {
        stx_get(a->x, s, c);
        stx_get(b->x, t, g);
    }
    top = cuda_largest(c, s->size, 1e-6);
    worst = max_difference(c, g, s->size);
    CHECK(worst <= tol * top, "words %d, %s: error %g of %g", kind, what, worst, top);
    free(c);
    free(g);
}

/* Runs a training step with each way of computing the loss that the kind supports. */
static void worded_train(worded *a, worded *b, int kind, double tol, const float *h,
                         const int32_t *id) {
    int which;
    size_t i;
    for (which = 0; which < (kind < WORDS_ADAPTIVE ? 3 : 2); which++) {
        stx_tensor *va, *vb, *la = worded_loss(a, which, h, id, &va),
                             *lb = worded_loss(b, which, h, id, &vb);
        CHECK(stx_ok(b->x) && CLOSE(stx_item(a->x, la), stx_item(b->x, lb), tol),
              "words %d, way %d: loss %g on the CPU, %g on the GPU, %s", kind, which,
              stx_item(a->x, la), stx_item(b->x, lb), stx_error(b->x));
        stx_backward(a->x, la);
        stx_backward(b->x, lb);
        worded_near(a, b, va, vb, 1, tol, "gradient of h", kind);
        for (i = 0; i < a->p->count; i++)
            worded_near(a, b, a->p->tensor[i], b->p->tensor[i], 1, tol, a->p->name[i], kind);
        stx_optim_step(a->o, 1e-3);
        stx_optim_step(b->o, 1e-3);
    }
}

static void worded_eval(worded *a, worded *b, int kind, double tol, const float *h) {
    stx_tensor *ha, *hb, *pa, *pb;
    stx_begin(a->x, STX_EVAL);
    stx_begin(b->x, STX_EVAL);
    ha = stx_input(a->x, h, WORDS_B, WORDS_T, WORDS_D, 0);
    hb = stx_input(b->x, h, WORDS_B, WORDS_T, WORDS_D, 0);
    pa = stx_vocab_io_log_probs(a->w, ha);
    pb = stx_vocab_io_log_probs(b->w, hb);
    CHECK(pb && pb->dim[2] == WORDS_V, "words %d: log p of %zu words: %s", kind,
          pb ? pb->dim[2] : 0, stx_error(b->x));
    if (pb) worded_near(a, b, pa, pb, 0, tol, "log p", kind);
    if (kind >= WORDS_ADAPTIVE) return;
    pa = stx_vocab_io_logits(a->w, ha);
    pb = stx_vocab_io_logits(b->w, hb);
    CHECK(pb && pb->dim[2] == WORDS_V && pb->size == WORDS_N * WORDS_V, "words %d: logits: %s",
          kind, stx_error(b->x));
    if (pb) worded_near(a, b, pa, pb, 0, tol, "logits", kind);
}

/* On a GPU, table padding must be zero. On the CPU, there is no padding. */
static void worded_padding_check(worded *a, worded *b, int kind) {
    size_t i, k;
    for (i = 0; i < b->p->count; i++) {
        const stx_tensor *t = b->p->tensor[i];
        float *padding = (float *)calloc(t->padding + 1, sizeof *padding);
        stx_download(b->x, padding, stx_offset_ptr(b->x, t->data, t->size), t->padding);
        for (k = 0; k < t->padding && padding[k] == 0; k++) continue;
        CHECK(k == t->padding, "words %d: element %zu of the padding of %s is %g", kind, k,
              b->p->name[i], (double)padding[k]);
        free(padding);
        CHECK(a->p->tensor[i]->padding == 0, "padding on a CPU");
    }
}

/* Returns the number of matmuls with unaligned rows so far. A real GPU does not count
   them; the result is then 0. */
static long unaligned_so_far(void) {
#ifdef SEQTX_CUDA_HOST
    return cuda_host_unaligned();
#else
    return 0;
#endif
}

static void unaligned_check(const char *name, long before) {
    long n = unaligned_so_far() - before;
    if (CUDA_ON_HOST) CHECK(n == 0, "%s: %ld matmuls with unaligned rows", name, n);
}

static void test_words(void) {
    int kind, half;
    float *h = cuda_random(WORDS_N * WORDS_D, 1, 0);
    int32_t *id = ids_of(WORDS_N, WORDS_V, 3);
    for (half = 0; half < 2; half++)
        for (kind = 0; kind < WORDS_KINDS; kind++) {
            const double tol = half ? 3e-2 : 2e-5;
            long unaligned = unaligned_so_far();
            worded a, b;
            worded_make(&a, kind, STX_CPU, STX_PREC_F32);
            worded_make(&b, kind, STX_CUDA, cuda_precision(half));
            worded_train(&a, &b, kind, tol, h, id);
            worded_eval(&a, &b, kind, tol, h);
            worded_padding_check(&a, &b, kind);
            CHECK(stx_ok(a.x) && stx_ok(b.x), "words %d: %s%s", kind, stx_error(a.x),
                  stx_error(b.x));
            unaligned_check("words", unaligned);
            stx_destroy(a.x);
            stx_destroy(b.x);
        }
    free(h);
    free(id);
}

/* With a vocabulary of 205 words, training on a GPU must match training on the CPU, and
   no matmul of a step may have unaligned rows. */
static void test_odd_vocabulary(void) {
    int half, n;
    model_vocab = 205;
    for (half = 0; half < 2; half++) {
        const double tol = half ? 3e-2 : 1e-4;
        double worst = 0;
        long unaligned = unaligned_so_far();
        model a, b;
        model_make(&a, SMALL, STX_CPU, STX_PREC_F32, 0);
        model_make(&b, SMALL, STX_CUDA, cuda_precision(half), 0);
        for (n = 0; n < STEPS; n++) {
            double la = model_run(&a, n, NULL), lb = model_run(&b, n, NULL);
            CHECK(stx_ok(b.x) && fabs(la - lb) <= tol * la,
                  "205 words, step %d: loss %.7f on the CPU, %.7f on the GPU: %s", n, la, lb,
                  stx_error(b.x));
        }
        if (!half) worst = params_error(b.x, b.m->params, a.m->params);
        CHECK(worst <= 1e-2, "205 words: after %d steps a parameter has an error of %g", STEPS,
              worst);
        unaligned_check("205 words", unaligned);
        model_free(&a);
        model_free(&b);
    }
    model_vocab = 0;
}

#ifdef SEQTX_CUDA_HOST
/* Counts the nodes that a layer adds to the graph of a step with a full memory. Each
   node costs one or two microseconds on the GPU, whatever it computes.
   `build/test_cuda_model nodes` lists them. */
static void test_nodes(void) {
    /* In one case, weight gradients are split along K and their sums deferred. */
    static const struct {
        int which;
        long nodes;
        int pieces;
    } expected[] = {{SMALL, 29, 0}, {SMALL, 30, 2}, {DROP, 31, 0}, {PERS, 21, 0}, {GROUPED, 33, 0}};

    long whole[2] = {0, 0};
    size_t i;
    for (i = 0; i < COUNT(expected); i++) {
        const char *name = model_names[expected[i].which];
        cuda_nodes all;
        int k, n;
        memset(&all, 0, sizeof all);
        for (k = 0; k < 2; k++) {
            model r;
            long batches = cuda_host_batches(), graphs = cuda_host_graph_launches();
            model_make_sized(&r, expected[i].which, STX_CUDA, STX_PREC_BF16, 0, 2, (size_t)(2 + k));
            inner_pieces(r.x, expected[i].pieces);
            for (n = 0; n < 14; n++) model_run(&r, n, NULL);
            batches = cuda_host_batches() - batches;
            if (i == 0) whole[k] = batches;
            CHECK(!expected[i].pieces || batches >= whole[k] + 6 * (2 + k),
                  "%ld batches of matmuls, %ld without splitting", batches, whole[k]);
            graphs = cuda_host_graph_launches() - graphs;
            CHECK(stx_ok(r.x) && graphs > 0, "%s: %ld graphs: %s%s", name, graphs, stx_error(r.x),
                  stx_step_replay_status(r.x));
            cuda_nodes_add(&all, k);
            model_free(&r);
        }
        cuda_nodes_check(&all, name, 2, expected[i].nodes, *part);
    }
}
#endif


// >>keys and status

/* A step that takes its tokens from the host must not be replayed, and its results must
   be correct. */
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
    CHECK(stx_step_index(a.x) == stx_step_index(b.x), "step index %d and %d",
          (int)stx_step_index(a.x), (int)stx_step_index(b.x));
    model_free(&a);
    model_free(&b);
}

/* A step that changes its own data and takes tokens from the host. Its function must be
   called once per step. */
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

    /* tests learning rates that are set only in the step's function */
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

    /* tests batches of other shapes once the memory is full */
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

/* stx_step_replay_status must return the reason why the last step was not captured, or
   "" if it was captured or replayed. */
static const char key_differs[] = "not captured: the key differs from that of the previous step";

static void empty_step(void *user) {
    stx_begin((stx_ctx *)user, STX_TRAIN);
}

static void status_of_replays(void) {
    model a, b;
    int n, captured = 0;
    CHECK(!stx_step_replay_status(NULL)[0], "no context");
    model_make_small(&a, SMALL, STX_CUDA, STX_PREC_F32, 1);
    model_make_small(&b, SMALL, STX_CUDA, STX_PREC_F32, 0);
    for (n = 0; n < 14; n++) {
        const char *status;
        model_run(&a, n, NULL);
        model_run(&b, n, NULL);
        CHECK(!stx_step_replay_status(a.x)[0], "step %d, without graphs: \"%s\"", n,
              stx_step_replay_status(a.x));
        status = stx_step_replay_status(b.x);
        captured |= !status[0];
        CHECK(n ? !captured || !status[0] : !strcmp(status, key_differs), "step %d: \"%s\"", n,
              status);
    }
    CHECK(captured, "after 14 steps: \"%s\"", stx_step_replay_status(b.x));
    model_free(&a);
    model_free(&b);
}

#ifdef SEQTX_CUDA_HOST
enum { REFUSED_STEPS = 14, ALL_STEPS = 20 };

/* Makes CUDA call number `call` of the capture fail. The run must continue
   bit-identically, and the status must say why the step was not captured. After a
   parameter is added, the step must be captured. loss, hash and index are the results
   of a run without graphs: its losses, and the hash of its parameters and its step
   index after REFUSED_STEPS steps. */
static void status_of_refusal(int call, const double *loss, uint64_t hash, uint64_t index) {
    static const char *const name[CUDA_HOST_GRAPH_CALLS] = {"cudaErrorStreamCaptureUnsupported",
                                                            "cudaErrorStreamCaptureInvalidated",
                                                            "cudaErrorMemoryAllocation"};
    model b;
    long replays;
    int n;
    model_make_small(&b, DROP, STX_CUDA, STX_PREC_F32, 0);
    replays = cuda_replays();
    cuda_host_fail_graph(call, 1);
    for (n = 0; n < REFUSED_STEPS; n++) {
        CHECK(model_run(&b, n, NULL) == loss[n], "call %d fails, step %d: expected %.9g, got %.9g",
              call, n, loss[n], b.loss);
        CHECK(stx_ok(b.x), "call %d fails, step %d: %s", call, n, stx_error(b.x));
    }
    replays = cuda_replays() - replays;
    CHECK(!replays && model_hash(&b) == hash && stx_step_index(b.x) == index,
          "call %d fails: %ld replays", call, replays);
    CHECK(strstr(stx_step_replay_status(b.x), name[call])
              && !strncmp(stx_step_replay_status(b.x), "not captured: CUDA ", 19),
          "call %d fails: status \"%s\"", call, stx_step_replay_status(b.x));
    CHECK(stx_param(stx_params_create(b.x), STX_ZEROS, 0, "new", 3, 0, 0, 0)
              && !stx_step_replay_status(b.x)[0],
          "a new parameter: \"%s\"", stx_step_replay_status(b.x));
    replays = cuda_replays();
    for (; n < ALL_STEPS; n++)
        CHECK(model_run(&b, n, NULL) == loss[n], "later, step %d: expected %.9g, got %.9g", n,
              loss[n], b.loss);
    replays = cuda_replays() - replays;
    CHECK(replays > 0 && !stx_step_replay_status(b.x)[0], "later: %ld replays, \"%s\"", replays,
          stx_step_replay_status(b.x));
    model_free(&b);
}

static void status_of_refusals(void) {
    double loss[ALL_STEPS];
    uint64_t hash = 0, index = 0;
    model a;
    int n, call;
    model_make_small(&a, DROP, STX_CUDA, STX_PREC_F32, 1);
    for (n = 0; n < ALL_STEPS; n++) {
        loss[n] = model_run(&a, n, NULL);
        if (n == REFUSED_STEPS - 1) {
            hash = model_hash(&a);
            index = stx_step_index(a.x);
        }
    }
    model_free(&a);
    for (call = 0; call < CUDA_HOST_GRAPH_CALLS; call++)
        status_of_refusal(call, loss, hash, index);
    cuda_host_reset_errors();
}
#endif

/* Checks the status when every step takes its tokens from the host. */
static void status_of_fresh(void) {
    model b;
    fresh_user u;
    int n;
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
}

/* At first, the keys are new or alternate. Then the key stays the same, and the step
   must be captured immediately. */
static void status_of_keys(void) {
    model b;
    int n, keys;
    for (keys = 2; keys <= 40; keys += 19) {
        model_make_small(&b, SMALL, STX_CUDA, STX_PREC_F32, 0);
        for (n = 0; n < 40; n++) {
            stx_step_run(b.x, (uint64_t)(n % keys), empty_step, b.x);
            CHECK(!strcmp(stx_step_replay_status(b.x), key_differs), "%d keys, step %d: \"%s\"",
                  keys, n, stx_step_replay_status(b.x));
        }
        for (n = 0; n < 3; n++) stx_step_run(b.x, 79, empty_step, b.x);
        CHECK(stx_ok(b.x) && !stx_step_replay_status(b.x)[0], "then one key: \"%s\" %s",
              stx_step_replay_status(b.x), stx_error(b.x));
        model_free(&b);
    }
}

static void test_status(void) {
    status_of_replays();
#ifdef SEQTX_CUDA_HOST
    status_of_refusals();
#endif
    status_of_fresh();
    status_of_keys();
}


// >>checkpoints, generation, bad input

/* A model that is saved on one device must load on the other. Its next steps must equal
   the uninterrupted run's. */
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
            int prec = cuda_precision(precision), same = device[k][0] == device[k][1];
            double tol = precision ? 3e-2 : 1e-4;
            size_t size = same || precision ? 1 : 2; /* batch size, and number of layers */
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
                CHECK(same ? la == lb : fabs(la - lb) <= tol * la,
                      "from device %d to %d, bf16 %d, step %d: expected %.8f, got %.8f",
                      device[k][0], device[k][1], precision, n, la, lb);
            }
            stx_optim_sync(b.o);
            CHECK(b.o->step == 10, "%d updates after four more steps", (int)b.o->step);
            model_free(&a);
            model_free(&b);
        }
    remove(path);
}

/* A model opened on another device has the same parameters and, nearly, the same
   scores. Weights cannot be packed on a GPU. */
static void test_opened(void) {
    static const int device[3][2] = {
        {STX_CPU, STX_CUDA}, {STX_CUDA, STX_CPU}, {STX_CUDA, STX_CUDA}};
    char path[] = "/tmp/seqtx_cuda_XXXXXX";
    int k, fd = mkstemp(path);
    if (fd >= 0) close(fd);
    for (k = 0; k < 3; k++) {
        static const int32_t ids[3] = {1, 2, 3};
        model a;
        stx_desc d;
        stx_ctx *x;
        stx_span *m;
        size_t i, n, e;
        model_make_small(&a, SMALL, device[k][0], STX_PREC_F32, 0);
        model_run(&a, 0, NULL);
        memset(&d, 0, sizeof d);
        d.device = device[k][1];
        d.threads = 1;
        x = stx_create(&d);
        CHECK(stx_span_save(a.m, path), "%s", stx_error(a.x));
        m = stx_span_open(x, path);
        CHECK(m && stx_ok(x), "from device %d to %d: %s", device[k][0], device[k][1],
              stx_error(x));
        for (i = e = 0; m && i < a.m->params->count; i++) {
            stx_real *v;
            n = a.m->params->tensor[i]->size;
            v = (stx_real *)malloc(2 * n * sizeof *v);
            stx_get(a.x, a.m->params->tensor[i], v);
            stx_get(x, m->params->tensor[i], v + n);
            e += memcmp(v, v + n, n * sizeof *v) != 0;
            free(v);
        }
        CHECK(e == 0, "from device %d to %d: %d parameters differ", device[k][0], device[k][1],
              (int)e);
        if (m) {
            const stx_real *p = stx_span_gen_feed(stx_span_gen_create(a.m, 1), ids, 3);
            const stx_real *q = stx_span_gen_feed(stx_span_gen_create(m, 1), ids, 3);
            CHECK(p && q && max_difference(p, q, a.V) < 2e-4, "the scores differ");
            stx_params_pack(stx_span_params(m), STX_WEIGHTS_INT8);
            CHECK(stx_ok(x) == (device[k][1] == STX_CPU), "%s", stx_error(x));
        }
        stx_destroy(x);
        model_free(&a);
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
            CHECK(la && lb, "%s: %s", model_names[which], stx_error(b.x));
            if (la && lb)
                CHECK(max_difference(la, lb, 2 * a.V) < 2e-4, "%s, token %d: logits differ by %g",
                      model_names[which], (int)at, max_difference(la, lb, 2 * a.V));
        }
        free(id);
        stx_span_gen_free(ga);
        stx_span_gen_free(gb);
        model_free(&a);
        model_free(&b);
    }
}

/* If a gradient is not finite, the device must skip the update, and stx_optim_sync must
   report this to the host. */
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
          "a NaN in a gradient: skipped %d, step %d",
          (int)r.o->skipped, (int)r.o->step);
    stx_download(r.x, bad, g->grad, 1);
    CHECK(bad[0] == 0, "the gradient is not zeroed: %g", (double)bad[0]);
    model_run(&r, 3, NULL);
    CHECK(stx_optim_sync(r.o) && r.o->step == 4 && r.o->skipped == 1 && model_hash(&r) != before,
          "the update after it");
    model_free(&r);
}

/* A bad token in a replayed step must be an error. Replays do not check tokens, so
   stx_tokens_set must check them. */
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


// >>NaN
/* A NaN with all bits set, which CUDA produces, must remain NaN in the attention
   matmuls and reach every gradient that depends on it; no clamp of an exponent may hide
   it. It is placed in q, k or v at batch row 0, head 0, time 7. Tested on the CPU, with
   version 0 and with the fused kernels. More elements of that head may become NaN,
   because 0 is multiplied by NaN if a query does not see a key of the same tile. */
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
    memcpy(a[which] + 7 * 16 + 3, &bits, 4); /* time 7, head 0, batch row 0 */
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

enum { NAN_N = 2 * 24 * 16 };

/* Nonzero if gradient i (of q, k, v) depends on the NaN in input `which`. */
static int nan_reaches(size_t i, int which) {
    size_t t = i / NAN_N, row = i % NAN_N / 16 % 24;
    if (t == 0) return which ? row >= 7 : row == 7;
    if (which == 0) return row <= 7;
    return which == 1 || t == 1; /* dv does not depend on v */
}

static int in_nan_head(size_t i) {
    return i % NAN_N / 16 < 24 && i % 16 < 8;
}

/* Nonzero if output i depends on the NaN in input `which`. */
static int nan_reaches_y(size_t i, int which) {
    size_t row = i / 16;
    if (!in_nan_head(i) || (which == 2 && i % 16 != 3)) return 0;
    return which ? row >= 7 : row == 7;
}

static void test_nan(void) {
    static float out[NAN_N], grads[3 * NAN_N];
    static const char *const name[] = {"CPU", "f32, fused", "f32, version 0", "bf16, fused",
                                       "bf16, version 0"};
    int run, which;
    for (run = 0; run < 5; run++) {
        stx_ctx *x = cuda_ctx(run ? STX_CUDA : STX_CPU, cuda_precision(run > 2));
        if (run) stx_cuda_attention(x, (run - 1) % 2);
        for (which = 0; which < 3; which++) {
            size_t i, hidden = 0, strays = 0;
            nan_grads(x, which, out, grads);
            for (i = 0; i < 3 * NAN_N; i++) {
                hidden += in_nan_head(i) && nan_reaches(i, which) && !isnan(grads[i]);
                strays += !in_nan_head(i) && isnan(grads[i]);
            }
            CHECK(!hidden && !strays,
                  "%s, a NaN in %c: %d gradients that depend on it are not NaN, %d of the other "
                  "heads are",
                  name[run], "qkv"[which], (int)hidden, (int)strays);
            for (i = hidden = strays = 0; i < NAN_N; i++) {
                hidden += nan_reaches_y(i, which) && !isnan(out[i]);
                strays += !nan_reaches_y(i, which) && isnan(out[i]);
            }
            CHECK(!hidden && (!strays || which == 2),
                  "%s, a NaN in %c: %d outputs that depend on it are not NaN, %d others are",
                  name[run], "qkv"[which], (int)hidden, (int)strays);
        }
        stx_destroy(x);
    }
}

#ifdef SEQTX_CUDA_HOST


// >>two GPUs

/* One model on each of two GPUs in one process. Each model runs alone on GPU 0, alone
   on its own GPU, or alternating with the other model. */
enum { ALONE_ON_0, ALONE, ALTERNATING, TURNS };

static void two_gpus_run(int half, int turn, uint64_t hash[2], double loss[2]) {
    /* one with dropout, one with the widest attention tiles */
    static const int kinds[2] = {DROP, WIDE};
    model r[2];
    int gpu, n;
    for (gpu = 0; gpu < 2; gpu++) {
        model_gpu = turn == ALONE_ON_0 ? 0 : gpu;
        model_make_small(r + gpu, kinds[gpu], STX_CUDA, cuda_precision(half), 0);
        if (turn == ALTERNATING) continue;
        for (n = 0; n < 6; n++) loss[gpu] = model_run(r + gpu, n, NULL);
        hash[gpu] = model_hash(r + gpu);
        model_free(r + gpu);
    }
    if (turn != ALTERNATING) return;
    for (n = 0; n < 6; n++)
        for (gpu = 0; gpu < 2; gpu++) loss[gpu] = model_run(r + gpu, n, NULL);
    for (gpu = 1; gpu >= 0; gpu--) {
        hash[gpu] = model_hash(r + gpu);
        CHECK(stx_ok(r[gpu].x), "GPU %d: %s", gpu, stx_error(r[gpu].x));
        model_free(r + gpu);
    }
}

/* All three runs of a model must be bit-identical. */
static void test_two_gpus(void) {
    int half, turn, gpu;
    cuda_host_devices(2);
    for (half = 0; half < 2; half++) {
        uint64_t hash[TURNS][2];
        double loss[TURNS][2];
        for (turn = 0; turn < TURNS; turn++) two_gpus_run(half, turn, hash[turn], loss[turn]);
        for (gpu = 0; gpu < 2; gpu++) {
            CHECK(hash[0][gpu] == hash[1][gpu] && loss[0][gpu] == loss[1][gpu],
                  "alone on GPU %d: other bits than on GPU 0", gpu);
            CHECK(hash[0][gpu] == hash[2][gpu] && loss[0][gpu] == loss[2][gpu],
                  "on GPU %d, alternating with the other GPU: other bits than alone", gpu);
        }
    }
    model_gpu = 0;
    cuda_host_devices(1);
    CHECK(cuda_host_bytes_in_use() == 0, "%zu bytes of device memory are in use at the end",
          cuda_host_bytes_in_use());
}


// >>errors that only the shim can cause

/* Tries to create a context, which must fail with an error that contains `a` and `b`. */
static void create_refused(const stx_desc *d, const char *what, const char *a, const char *b) {
    stx_ctx *x = stx_create(d);
    CHECK(!stx_ok(x) && strstr(stx_error(x), a) && strstr(stx_error(x), b)
              && (d->gpu || stx_error_code(x) == STX_ERR_DEVICE)
              && stx_ctx_desc(x)->device == STX_CPU,
          "%s: code %d, %s", what, stx_error_code(x), stx_error(x));
    stx_destroy(x);
}

static void errors_of_devices(void) {
    stx_desc d;
    memset(&d, 0, sizeof d);
    d.device = STX_CUDA;
    cuda_host_devices(0);
    create_refused(&d, "no device", "no CUDA device", "");
    cuda_host_devices(1);
    d.gpu = 3;
    create_refused(&d, "no fourth device", "gpu: expected", "got 3");
    d.gpu = 0;
    cuda_host_arch(7, 5);
    create_refused(&d, "an old device", "sm_75", "-arch");
    cuda_host_arch(9, 0);
    CHECK(cuda_host_bytes_in_use() == 0, "%zu bytes of device memory are in use after refusals",
          cuda_host_bytes_in_use());
}

/* Performs run n. Up to n = 59, the device's memory grows with n. From n = 60 on,
   allocation n - 59 fails, and arenas retry with a smaller size. Returns nonzero if the
   run ended with an error. */
static int short_of_memory(long n) {
    stx_span_desc sd;
    stx_desc d;
    model r;
    int stopped;
    memset(&d, 0, sizeof d);
    memset(&sd, 0, sizeof sd);
    memset(&r, 0, sizeof r);
    d.device = STX_CUDA;
    sd.vocab = 23;
    sd.layers = 1;
    sd.dim = 32;
    sd.heads = 2;
    sd.span = 40;
    if (n < 60)
        cuda_host_memory((size_t)n * 60000);
    else
        cuda_host_fail_alloc(n - 59);
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
    if (stopped && !strstr(stx_error(r.x), "stx_create") && !strstr(stx_error(r.x), "workspace"))
        CHECK((strstr(stx_error(r.x), "arena") || strstr(stx_error(r.x), "block")
               || strstr(stx_error(r.x), "scratch"))
                  && strstr(stx_error(r.x), "use"),
              "allocation %ld fails: no place and no option in the error: %s", n, stx_error(r.x));
    if (stopped)
        CHECK(stx_error_code(r.x) == STX_ERR_MEMORY && strlen(stx_error(r.x)) > 20,
              "allocation %ld fails: code %d, %s", n, stx_error_code(r.x), stx_error(r.x));
    stx_span_state_free(r.s);
    stx_destroy(r.x);
    return stopped;
}

static void errors_of_memory(void) {
    long n, refused = 0;
    model r;
    model_make(&r, SMALL, STX_CUDA, STX_PREC_BF16, 0);
    model_run(&r, 0, NULL);
    model_free(&r);
    CHECK(cuda_host_bytes_in_use() == 0, "%zu bytes of device memory are in use",
          cuda_host_bytes_in_use());
    for (n = 1; n < 100; n++) {
        refused += short_of_memory(n);
        cuda_host_fail_alloc(0);
        cuda_host_memory((size_t)8 << 30);
        CHECK(cuda_host_bytes_in_use() == 0,
              "allocation %ld fails: %zu bytes of device memory are in use", n,
              cuda_host_bytes_in_use());
    }
    CHECK(refused > 5, "%ld of 99 runs short of memory ended with an error", refused);
}

/* desc.max_bytes must also limit device memory. */
static void errors_of_max_bytes(void) {
    stx_desc d;
    stx_ctx *x;
    size_t bytes;
    memset(&d, 0, sizeof d);
    d.device = STX_CUDA;
    d.max_bytes = 3 << 20;
    x = stx_create(&d);
    CHECK(stx_block_activations(x, 1 << 18) && !stx_block_activations(x, 1 << 20)
              && strstr(stx_error(x), "max_bytes"),
          "the limit: %s", stx_error(x));
    bytes = stx_bytes(x);
    CHECK(bytes >= 1 << 20 && bytes == cuda_host_bytes_in_use() - 256,
          "stx_bytes is %zu, the device counts %zu", bytes, cuda_host_bytes_in_use());
    stx_destroy(x);
}

/* Launch n fails: the error must be sticky and name the operation, and the host must
   continue. */
static void errors_of_launch(long n) {
    model r;
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
        CHECK(!strcmp(text, stx_error(r.x)), "the first error is not kept: %s", stx_error(r.x));
    }
    model_free(&r);
    cuda_host_reset_errors();
}

static void test_errors(void) {
    model r;
    long n;
    errors_of_devices();
    errors_of_memory();
    errors_of_max_bytes();
    for (n = 1; n < 400; n += 23) errors_of_launch(n);
    model_make(&r, SMALL, STX_CUDA, STX_PREC_F32, 0);
    CHECK(isfinite(model_run(&r, 0, NULL)), "a new context afterwards: %s", stx_error(r.x));
    model_free(&r);
    CHECK(cuda_host_bytes_in_use() == 0 && cuda_host_pinned_in_use() == 0,
          "%zu bytes of device memory and %zu of pinned memory are in use at the end",
          cuda_host_bytes_in_use(), cuda_host_pinned_in_use());
}
#endif


// >>main
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
        {"padding", test_padding},
        {"scalars", test_scalars},
        {"clusters", test_clusters},
        {"not repeatable", test_not_repeatable},
        {"keys", test_keys},
        {"late", test_late},
        {"note", test_status},
        {"checkpoint", test_checkpoint},
        {"opened", test_opened},
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
    return cuda_test_end();
}
