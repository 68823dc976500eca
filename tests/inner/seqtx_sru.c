/* The implementation of seqtx_sru.h, and what tests look at inside it (tests/inner.h). */
#ifndef SEQTX_SRU_IMPLEMENTATION
  #define SEQTX_SRU_IMPLEMENTATION
#endif
#include "../../seqtx_sru.h"
#include "../inner.h"

stx_tensor *inner_sru_transform(stx_sru *m, size_t l, stx_tensor *h, stx_tensor *M, const stx_ids *before, const stx_ids *pad,
                                size_t B, size_t Tm, size_t T, size_t window) {
    return stx__sru_transform(m, l, h, M, stx__sru_key_pad(m->ctx, before, pad, B, Tm, T), window);
}
