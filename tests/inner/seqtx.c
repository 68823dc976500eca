/* The implementation of seqtx.h, and what tests look at inside it (tests/inner.h). */
#ifndef SEQTX_IMPLEMENTATION
  #define SEQTX_IMPLEMENTATION
#endif
#include "../../seqtx.h"
#include "../inner.h"

const char *inner_micro_name(const stx_ctx *x) { return stx__mk(x)->name; }
