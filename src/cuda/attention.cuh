#pragma once
#include "common.cuh"
#include "attention_plain_calls.cuh"
#include "attention_fwd.cuh"
#include "attention_bwd.cuh"


// >>attention

enum { STX__ATTN_MAX_HEADS = 256 };

/* Returns whether to use the fused kernels: they must support the call, and g->attention
   must not select the plain kernels (see stx_cuda_attention). row_max and inv_sum are
   always floats, because the forward and the backward pass may use different versions. */
static int stx__attn_use_fused(stx_ctx *x, const stx_attention_args *a) {
    int version = stx__gpu(x)->attention;
    return version != 1 && version != 3 && stx__attn_fused_can(x, a);
}

/* Returns 1 if there is nothing to do. If the call has too many heads, sets an error
   and returns 1. */
static int stx__attn_refused(stx_ctx *x, const stx_attention_args *a, const char *what) {
    if (a->H <= STX__ATTN_MAX_HEADS) return !stx_ok(x) || !a->B || !a->T || !a->H || !a->D;
    stx_fail(x, STX_ERR_SHAPE, "%s: heads: expected at most %d, got %zu", what,
             (int)STX__ATTN_MAX_HEADS, a->H);
    return 1;
}

extern "C" size_t stx_attention_work_cuda(stx_ctx *x, const stx_attention_args *a, int backward) {
    stx__attn_plain A;
    if (a->H > STX__ATTN_MAX_HEADS || !a->B || !a->T || !a->H || !a->D) return 0;
    if (stx__attn_use_fused(x, a) && (!backward || stx__attn_fused_bwd_can(x, a)))
        return backward ? stx__attn_fused_bwd_work(x, a) : stx__attn_fused_fwd_work(a);
    memset(&A, 0, sizeof A);
    A.x = x;
    A.a = a;
    return stx__attn_plain_layout(&A, backward);
}

extern "C" void stx_attention_fwd_cuda(stx_ctx *x, const stx_attention_args *a) {
    if (stx__attn_refused(x, a, "stx_attention_fwd")) return;
    if (stx__attn_use_fused(x, a))
        stx__attn_fused_fwd(x, a);
    else
        stx__attn_plain_fwd(x, a);
}

extern "C" void stx_attention_bwd_cuda(stx_ctx *x, const stx_attention_args *a) {
    if (stx__attn_refused(x, a, "stx_attention_bwd")) return;
    if (stx__attn_use_fused(x, a) && stx__attn_fused_bwd_can(x, a))
        stx__attn_fused_bwd(x, a);
    else
        stx__attn_plain_bwd(x, a);
}

extern "C" void stx_cuda_attention(stx_ctx *x, int version) {
    if (stx__gpu(x)) stx__gpu(x)->attention = version;
}
