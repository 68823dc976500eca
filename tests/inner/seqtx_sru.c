/* The implementation of seqtx_sru.h, and access to its internal functions for the tests
   (tests/inner/inner.h). */
#ifndef SEQTX_SRU_IMPLEMENTATION
  #define SEQTX_SRU_IMPLEMENTATION
#endif
#include "../../seqtx_sru.h"
#include "inner.h"

/* Calls stx__sru_transform with the padding `before` (B,M) of the memory and pad (B,T)
   of h. */
stx_tensor *inner_sru_transform(stx_sru *m, size_t l, stx_tensor *h, stx_tensor *memory,
                                const stx_ids *before, const stx_ids *pad, size_t B, size_t M,
                                size_t T, size_t window) {
    const stx_ids *key_pad = stx__sru_key_pad(m->ctx, before, pad, B, M, T);
    return stx__sru_transform(m, l, h, memory, key_pad, window);
}
