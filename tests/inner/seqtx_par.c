/* The implementation of seqtx_par.h, and access to its internal functions for the tests
   (tests/inner/inner.h). */
#ifndef SEQTX_PAR_IMPLEMENTATION
  #define SEQTX_PAR_IMPLEMENTATION
#endif
#include "../../seqtx_par.h"
#include "inner.h"

stx_tensor *inner_par_mix(stx_ctx *x, stx_tensor *const *in, size_t period,
                          size_t rows_per_draw, double eps) {
    return stx__par_mix(x, in, period, rows_per_draw, eps);
}

stx_tensor *inner_par_gate(stx_ctx *x, stx_tensor *al, const stx_par_gate_args *how,
                           stx_tensor **lat) {
    return stx__par_gate_op(x, al, how, lat);
}

stx_tensor *inner_par_latency(stx_ctx *x, stx_tensor *nll, stx_tensor *lat,
                              const stx_par_latency_args *how) {
    return stx__par_latency_op(x, nll, lat, how);
}

stx_tensor *inner_par_widen(stx_ctx *x, stx_tensor *a, stx_tensor *b, size_t w, size_t ld,
                            double fill, int full) {
    return stx__par_widen(x, a, b, w, ld, fill, full);
}
