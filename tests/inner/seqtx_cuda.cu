/* seqtx_cuda.cu, and what tests look at inside it (tests/inner.h). */
#include "../../seqtx_cuda.cu"
#include "../inner.h"

size_t inner_plans(const stx_ctx *x) { const stx__plans *p = (const stx__plans *)stx__gpu(x)->plans; return p ? p->count : 0; }
void inner_tune(stx_ctx *x, int tune) { stx__gpu(x)->tune = tune; }
