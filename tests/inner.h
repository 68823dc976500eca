/* inner.h - what tests look at inside the library. tests/inner/NAME.c is the implementation of NAME.h with these functions after it:
   the Makefile compiles it once for each configuration, and the test programs, which have only declarations, link it. Include after
   the headers whose part is wanted. */
#ifndef STX_TEST_INNER_H
#define STX_TEST_INNER_H
#ifdef __cplusplus
extern "C" {
#endif

/* seqtx.h: the name of the matrix product's own kernel, whatever library makes the product */
extern const char *inner_micro_name(const stx_ctx *x);

#ifdef SEQTX_SRU_H
/* U of layer l of input h and memory M; before and pad are what is padded of them */
extern stx_tensor *inner_sru_transform(stx_sru *m, size_t l, stx_tensor *h, stx_tensor *M, const stx_ids *before, const stx_ids *pad,
                                       size_t B, size_t Tm, size_t T, size_t window);
#endif

#ifdef __cplusplus
}
#endif
#endif
