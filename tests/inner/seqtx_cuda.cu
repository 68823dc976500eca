/* seqtx_cuda.cu, and what tests look at inside it (tests/inner.h). */
#include "../../seqtx_cuda.cu"
#include "../inner.h"

size_t inner_plans(const stx_ctx *x) { const stx__plans *p = (const stx__plans *)stx__gpu(x)->plans; return p ? p->count : 0; }
void inner_tune(stx_ctx *x, int tune) { stx__gpu(x)->tune = tune; }
void inner_pieces(stx_ctx *x, int pieces) { stx__gpu(x)->pieces = pieces; }
size_t inner_pieces_of(size_t M, size_t N, size_t K, int late) { return stx__pieces_of(M, N, K, late); }
