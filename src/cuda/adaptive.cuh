#pragma once
#include "common.cuh"
#include "sums.cuh"


// >>adaptive input and output

/* Computes the log probabilities of the words of cluster c for stx__cluster_log_probs,
   from the logits (N,w) of the cluster. With z = log sum_j e^logits[n,j] over row n:

       c = 0:  out[n,start+j] = logits[n,j] - z     j < size
               gate[n,j] = (logit of cluster j) - z j = 1 .. K - 1; columns from `size`
                                                    have these logits, in ascending
                                                    order (forward) or in descending
                                                    order
       c > 0:  out[n,start+j] = logits[n,j] - z + gate[n,c]

   out is (N,V), gate (N,K). A block processes a row, with sums in double; only
   evaluation and generation use this kernel. Each thread adds every 256th column in
   order, then a fixed tree adds the threads' sums. */
STX__GLOBAL(256)
stx__cluster_kernel(stx__array out, stx__array gate, stx__array logits, size_t N, size_t V,
                    size_t start, size_t size, size_t w, size_t K, size_t c, int forward) {
    STX__SHARED(float, sh, 32);
    STX__SHARED(double, sums, 32);
    for (size_t n = blockIdx.x; n < N; n += gridDim.x) {
        float m = -HUGE_VALF;
        double z = 0, add = c ? (double)stx__get(gate, n * K + c) : 0;
        for (size_t j = threadIdx.x; j < w; j += 256) m = fmaxf(m, stx__get(logits, n * w + j));
        m = stx__row_max<256>(m, sh);
        for (size_t j = threadIdx.x; j < w; j += 256)
            z += exp((double)(stx__get(logits, n * w + j) - m));
        z = (double)m + log(stx__row_sum<256>(z, sums));

        if (!c)
            for (size_t j = 1 + threadIdx.x; j < K; j += 256) {
                const size_t column = forward ? size + j - 1 : size + K - 1 - j;
                stx__put(gate, n * K + j, (float)((double)stx__get(logits, n * w + column) - z));
            }
        for (size_t j = threadIdx.x; j < size; j += 256)
            stx__put(out, n * V + start + j,
                     (float)((double)stx__get(logits, n * w + j) - z + add));
    }
}

void stx__cluster_log_probs_cuda(stx_ctx *x, const stx__cluster_log_probs_args *a) {
    stx__array O = stx__array_of(x, a->out), G = stx__array_of(x, a->gate),
               A = stx__array_of(x, a->logits);
    if (a->N && a->w)
        STX__RUN_KERNEL(x, "stx_adaptive_log_probs", stx__cluster_kernel,
                        stx__blocks(a->N, 1, (size_t)1 << 30), 256, 0, O, G, A, a->N, a->V,
                        a->start, a->size, a->w, a->K, a->c, a->forward);
}
