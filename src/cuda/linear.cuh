#pragma once
#include "common.cuh"
#include "sums.cuh"
#include "gemm.cuh"
#include "elementwise.cuh"


// >>linear

/* y (N,O) = act(`in` W^T + b), with `in` (N,Ci) and W (O,Ci). GEMM, bias and ReLU take
   one pass. GELU, tanh and sigmoid take another pass over the output of the GEMM,
   because cublasLt only has the tanh approximation of GELU, and seqtx uses the exact
   one. The GEMM writes to pre (N,O) if it is not NULL, else to y. */
void stx_linear_fwd_cuda(stx_ctx *x, const stx_linear_args *a) {
    const size_t N = a->N, O = a->O;
    const int act = a->act, relu = act == STX_ACT_RELU && !a->pre;
    stx_real *to = a->pre ? a->pre : a->y;
    stx_gemm_args g = stx_gemm_init(0, 1, N, O, a->Ci, a->in, a->W, to);
    if (!stx_ok(x) || !N || !O) return;
    if (stx__lt_gemm(x, "stx_linear_fwd", &g, a->b, relu, 0) == STX__LT_PRODUCT) {
        stx_bias_act_fwd_cuda(x, to, NULL, a->b, N, O, a->pre ? STX_ACT_NONE : act);
        if (!a->pre) return;
    }
    if (a->pre || (act && !relu)) stx_act_fwd_cuda(x, a->y, to, N * O, act);
}

/* da (N,O) = da act'(a), and `part` (chunks,O) = the column sums of the new da over
   chunks of `rows` rows, in one pass over da. `from` is what the slope is computed from:
   `a` for GELU, otherwise act(a). */
template <int S>
STX__GLOBAL(256)
stx__slope_columns_kernel(float *part, stx__array da, stx__array from, size_t N, size_t O,
                          size_t rows, int act) {
    constexpr int W = stx__width<S>;
    STX__SHARED(float, sh, 8 * 32 * W);
    struct terms {
        float g[W], v[W];
    };
    da = stx__stored<S>(da);
    from = stx__stored<S>(from);
    stx__column_sums<1, W, 2>(
        part, O, N, O, rows, sh,
        [&](size_t n, size_t c) {
            terms t;
            stx__getn<W>(t.g, da, n * O + c);
            stx__getn<W>(t.v, from, n * O + c);
            return t;
        },
        [&](float (&s)[1][W], terms &t, size_t n, size_t c) {
            for (int e = 0; e < W; e++) {
                t.g[e] = stx__act_slope(t.g[e], t.v[e], t.v[e], act);
                s[0][e] += t.g[e];
            }
            stx__putn<W>(da, n * O + c, t.g);
        });
}

/* da = da act'(a), and db += the column sums of da, except for the last `padding`
   columns. The chunks depend on N alone, so the sums are the same on every GPU. */
static void stx__slope_columns(stx_ctx *x, const char *what, const stx_linear_bwd_args *a) {
    const size_t N = a->N, O = a->O;
    const stx__array D = stx__array_of(x, a->da),
                     F = stx__array_of(x, a->act == STX_ACT_GELU ? a->pre : a->y);
    const int access = stx__access(O, {D, F}, {});
    const stx__column_launch l =
        stx__column_launch_of(x, what, N, O, 1, access, (a->deferred & STX_DEFER_DB) != 0);
    if (!l.part) return;
    STX__CHOOSE(S, access, (STX__FLOATS, STX__HALVES, STX__MIXED),
                STX__RUN_KERNEL(x, what, stx__slope_columns_kernel<S>, l.grid, 256, 0, l.part, D, F,
                                N, O, l.rows, a->act));
    stx__column_launch_end(x, &l, &a->db, 1, O - a->padding);
}

/* Gradients of y = act(a), a = `in` W^T + b:
       da = dy act'(a)
       dx (N,Ci) = or += da W
       dW (O,Ci) += da^T in
       db (O) += sum_n da

   The epilogue BGRADB of cublasLt could compute db in the GEMM for dW. This epilogue is
   not used, because it overwrites db instead of adding to it, requires db to have the
   type of dW, and narrows the choice of algorithms. With an activation, da must be read
   and written anyway, so summing it costs nothing more. */
void stx_linear_bwd_cuda(stx_ctx *x, const stx_linear_bwd_args *a) {
    const size_t N = a->N, I = a->Ci, O = a->O;
    const int db = a->db && N && O;
    stx_gemm_args g;
    if (!stx_ok(x)) return;
    if (a->act && db) {
        stx__slope_columns(x, "stx_linear_bwd, db", a);
    } else if (a->act) {
        stx_act_bwd_args slope = {N * O, a->act, 0, a->y, a->pre, a->da, a->da};
        stx_act_bwd_cuda(x, &slope);
    } else if (db) {
        stx__columns_args columns = stx__columns_init(a->db, a->da, N, O);
        columns.padding = a->padding;
        columns.deferred = (a->deferred & STX_DEFER_DB) != 0;
        stx__columns(x, "stx_linear_bwd, db", &columns);
    }

    if (a->dx) {
        g = stx_gemm_init(0, 0, N, I, O, a->da, a->W, a->dx);
        g.beta = a->accumulate ? 1.0f : 0.0f;
        stx__lt_gemm(x, "stx_linear_bwd, dx", &g, NULL, 0, 0);
    }
    if (a->dW) {
        g = stx_gemm_init(1, 0, O, I, N, a->da, a->in, a->dW);
        g.beta = 1;
        if (a->batch > 1) {
            g.batch = a->batch;
            g.sa = a->sda;
            g.sb = a->sin;
            g.sc = 0;
        }
        stx__lt_add(x, "stx_linear_bwd, dW", &g, O - a->padding, (a->deferred & STX_DEFER_DW) != 0);
    }
}

/* Reorders blocks of n elements, see stx__heads_args: block i of y is block `of[i]` of
   `a` if `of[i]` < `half`, else block `of[i]` - `half` of b. The same launch then
   copies the memory rows of each group of heads, from `from` to `to`. The backward pass
   adds the blocks of dy to da and db. */
typedef struct stx__heads {
    stx__array a, b, y, from[STX_HEAD_GROUPS], to[STX_HEAD_GROUPS];
    size_t n;           /* elements per block */
    size_t blocks;      /* elements in all blocks; the memory rows follow */
    size_t end[STX_HEAD_GROUPS];    /* index of the first element after the memory rows of
                                       each group */
    size_t stride, len[STX_HEAD_GROUPS];
    int half, backward;
    uint16_t of[512];
} stx__heads;

/* A thread handles W adjacent elements of the output at a time. */
template <int W> STX__GLOBAL(256) stx__heads_kernel(stx__heads h, size_t n) {
    STX__STEP(i, n, W) {
        if (i >= h.blocks) {
            /* element i is in group k of the memory rows. This group begins at element
               `begin` */
            const int later = i < h.end[1] ? 1 : 2, k = i < h.end[0] ? 0 : later;
            const size_t later_begin = k == 1 ? h.end[0] : h.end[1],
                         begin = k == 0 ? h.blocks : later_begin;
            const size_t at = i - begin, len = h.len[k];
            float v[W];
            stx__getn<W>(v, h.from[k], at / len * h.stride + at % len);
            stx__putn<W>(h.to[k], at, v);
            continue;
        }
        const int of = h.of[i / h.n], second = of >= h.half;
        const size_t at = (size_t)(second ? of - h.half : of) * h.n + i % h.n;
        const stx__array w = second ? h.b : h.a;
        float v[W], s[W];
        if (!h.backward) {
            stx__getn<W>(v, w, at);
            stx__putn<W>(h.y, i, v);
        } else if (w.p) {
            stx__getn<W>(v, h.y, i);
            stx__getn<W>(s, w, at);
            for (int e = 0; e < W; e++) s[e] += v[e];
            stx__putn<W>(w, at, s);
        }
    }
}

static void stx__heads_run(stx_ctx *x, const char *what, const stx__heads_args *a, int backward) {
    stx__heads h;
    size_t n = a->n * a->count;
    int four;
    memset(&h, 0, sizeof h);
    h.a = stx__array_of(x, backward ? a->da : a->a);
    h.b = stx__array_of(x, backward ? a->db : a->b);
    h.y = stx__array_of(x, backward ? a->dy : a->y);
    h.n = a->n;
    h.blocks = n;
    h.half = (int)a->half;
    h.backward = backward;
    h.stride = a->stride;
    memcpy(h.of, a->of, sizeof h.of);
    four = a->n % 4 == 0 && a->stride % 4 == 0 && stx__aligned4(h.a) && stx__aligned4(h.b)
           && stx__aligned4(h.y);
    for (int k = 0; k < STX_HEAD_GROUPS; k++) {
        h.from[k] = stx__array_of(x, a->from[k]);
        h.to[k] = stx__array_of(x, a->to[k]);
        h.len[k] = a->len[k];
        if (!backward) n += a->B * a->len[k];
        h.end[k] = n;
        four = four && a->len[k] % 4 == 0 && stx__aligned4(h.from[k]) && stx__aligned4(h.to[k]);
    }
    if (n) STX__RUN_BY(x, what, four, stx__heads_kernel, n, h, n);
}

void stx__heads_fwd_cuda(stx_ctx *x, const stx__heads_args *h) {
    stx__heads_run(x, "stx_linear_heads", h, 0);
}

void stx__heads_bwd_cuda(stx_ctx *x, const stx__heads_args *h) {
    stx__heads_run(x, "stx_linear_heads, backward", h, 1);
}

/* With a = y (N,C) + b (C), sets pre (N,C) = a and y = act(a). b and pre may be NULL;
   n = N C. A thread handles W adjacent elements of a row at a time. */
template <int W>
STX__GLOBAL(256)
stx__bias_act_kernel(stx__array y, stx__array pre, stx__array b, size_t n, size_t C, int act) {
    STX__STEP(i, n, W) {
        float v[W], w[W];
        stx__getn<W>(v, y, i);
        if (b.p) {
            stx__getn<W>(w, b, i % C);
            for (int e = 0; e < W; e++) v[e] += w[e];
        }
        if (pre.p) stx__putn<W>(pre, i, v);
        for (int e = 0; e < W; e++) v[e] = stx__act(v[e], act);
        stx__putn<W>(y, i, v);
    }
}

void stx_bias_act_fwd_cuda(stx_ctx *x, stx_real *y, stx_real *pre, const stx_real *b, size_t N,
                           size_t C, int act) {
    stx__array Y = stx__array_of(x, y), P = stx__array_of(x, pre), B = stx__array_of(x, b);
    const size_t n = N * C;
    const int four = C % 4 == 0 && stx__aligned4(Y) && stx__aligned4(P) && stx__aligned4(B);
    if (n && (b || pre || act))
        STX__RUN_BY(x, "stx_bias_act_fwd", four, stx__bias_act_kernel, n, Y, P, B, n, C, act);
}
