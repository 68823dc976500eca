/* seqtx_cuda.cu, with access to its internal functions for the tests (inner.h). */
#include "../../seqtx_cuda.cu"
#include "inner.h"

size_t inner_plans(const stx_ctx *x) {
    const stx__plans *p = (const stx__plans *)stx__gpu(x)->plans;
    return p ? p->count : 0;
}

void inner_tune(stx_ctx *x, int tune) {
    stx__gpu(x)->tune = tune;
}

void inner_pieces(stx_ctx *x, int pieces) {
    stx__gpu(x)->split_k = pieces;
}

size_t inner_pieces_of(size_t M, size_t N, size_t K, int late) {
    return stx__split_k_of(M, N, K, late);
}

#ifdef SEQTX_NCCL
void inner_group_timeout(stx_ctx *x, double seconds) {
    stx__gpu(x)->group->timeout = seconds;
}
#endif

static void inner_fused_of(inner_fused_kernel *k, const char *form, int D, int a, int b, int c,
                           int threads, size_t shared, size_t more) {
    snprintf(k->name, sizeof k->name, form, D, a, b, c);
    k->threads = threads;
    k->shared = shared;
    k->more = more;
}

int inner_fused(stx_ctx *x, size_t D, int two, inner_fused_kernel *k) {
    const int DP = D > 96 ? 128 : ((int)D + 31) / 32 * 32; /* the padded head dimension */
    /* never read: only addresses and types matter */
    stx_real *p = stx_block_activations(x, 4096);
    stx_attention_args a;
    stx__attn_bwd_params ab;
    stx__attn_bwd_choice c;
    stx__attn_fwd_choice f;
    int n = 0, wide;
    memset(&a, 0, sizeof a);
    a.H = 8;
    a.D = D;
    a.P = 1152;
    a.pe_heads = 1;
    a.span = 1152;
    a.delta_min = 1;
    a.scale = 1;
    a.q_row_stride = a.kv_row_stride = a.H * D;
    a.q = a.k = a.v = a.pe = a.dy = p;
    a.y = a.dq = a.dk = a.dv = a.dpe = p;
    if (two) a.content_bias = a.position_bias = p;
    for (wide = 0; wide < 2; wide++) { /* one strip of queries per warp, then two */
        a.B = 64;
        a.T = wide ? 512 : 64;
        a.S = a.T + 1152;
        a.q_batch_stride = a.T * a.q_row_stride;
        a.kv_batch_stride = a.S * a.kv_row_stride;
        if (!stx__attn_bwd_params_of(x, &a, &ab, &c)) break;
        f = stx__attn_fwd_choose(x, &ab.p, 1);
        if (wide && f.bq == 64) break;
        inner_fused_of(&k[n++],
                       two ? "stx__attn_fwd<stx__attn_bf16,%d,%d,%d,1>"
                           : "stx__attn_fwd<stx__attn_bf16,%d,%d,%d,0>",
                       DP, f.bk, f.bq / 64, 0, 128, f.shared, 0);
    }
    a.T = 64;
    a.S = 1216;
    if (n && stx__attn_bwd_params_of(x, &a, &ab, &c)) {
        inner_fused_of(&k[n++],
                       "stx__attn_bwd_queries<stx__attn_bwd_shape<stx__attn_bf16,%d,%d,%d>>", DP,
                       c.bq, c.bk, 0, c.threads, c.shared_queries, c.more_queries);
        inner_fused_of(&k[n++], "stx__attn_bwd_keys<stx__attn_bwd_shape<stx__attn_bf16,%d,%d,%d>>",
                       DP, c.bq, c.bk, 0, c.threads, c.shared_keys, c.more_keys);
        inner_fused_of(&k[n++], "stx__attn_bwd_table<stx__attn_bwd_shape<stx__attn_bf16,%d,%d,%d>>",
                       DP, c.bq, c.bk, 0, c.threads, c.shared_table, 0);
        inner_fused_of(&k[n++],
                       "stx__attn_bwd_diagonals<stx__attn_bwd_shape<stx__attn_bf16,%d,%d,%d>>", DP,
                       c.bq, c.bk, 0, c.threads, c.shared_diagonals, c.more_diagonals);
    }
    stx_block_device_free(x, p);
    return n;
}
