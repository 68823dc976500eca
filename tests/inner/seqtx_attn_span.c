/* The implementation of seqtx_attn_span.h, and access to its internal functions for the
   tests (tests/inner/inner.h). */
#ifndef SEQTX_ATTN_SPAN_IMPLEMENTATION
  #define SEQTX_ATTN_SPAN_IMPLEMENTATION
#endif
#include "../../seqtx_attn_span.h"
#include "inner.h"

void inner_span_groups(const stx_span *m, size_t l, size_t B, size_t rows, int masked,
                       stx_head_groups *g) {
    stx__span_groups(m, l, B, rows, masked, g);
}
