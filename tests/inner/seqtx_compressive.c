/* The implementation of seqtx_compressive.h, and access to its internal functions for the
   tests (tests/inner/inner.h). */
#ifndef SEQTX_COMPRESSIVE_IMPLEMENTATION
  #define SEQTX_COMPRESSIVE_IMPLEMENTATION
#endif
#include "../../seqtx_compressive.h"
#include "inner.h"

stx_tensor *inner_comp_gate(stx_ctx *x, int kind, stx_tensor *const *in) {
    return stx__comp_gate_op(x, kind, in);
}

stx_tensor *inner_comp_distance(stx_ctx *x, stx_tensor *a, stx_tensor *target, const stx_ids *skip,
                                double count, stx_tensor **rel_error) {
    return stx__comp_error_op(x, a, target, skip, count, rel_error);
}

stx_tensor *inner_comp_folded(stx_ctx *x, stx_tensor *y, const stx_comp_groups *g) {
    return stx__comp_fold_op(x, y, g);
}

stx_tensor *inner_comp_zero(stx_ctx *x, stx_tensor *a, const stx_ids *pad) {
    return stx__comp_zero_rows(x, a, pad);
}

stx_tensor *inner_comp_all_heads(stx_ctx *x, const stx_comp_desc *d, stx_tensor *kv) {
    return stx__comp_all_heads(x, d, kv);
}
