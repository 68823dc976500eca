/* The implementation of seqtx_attn_span.h, and what tests look at inside it (tests/inner.h). */
#ifndef SEQTX_ATTN_SPAN_IMPLEMENTATION
  #define SEQTX_ATTN_SPAN_IMPLEMENTATION
#endif
#include "../../seqtx_attn_span.h"
#include "../inner.h"

void inner_span_window(const stx_span *m, size_t l, size_t *S, size_t *C) { stx__span_window(m, l, S, C); }
