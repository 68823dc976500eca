/* The implementation of seqtx.h, and access to its internal functions for the tests
   (tests/inner/inner.h). */
#ifndef SEQTX_IMPLEMENTATION
  #define SEQTX_IMPLEMENTATION
#endif
#ifdef TEST_AMX_EMULATED
  #include "amx.h"
#endif
#ifdef SEQTX_CUDA_HOST
  #define STX__DEVICE_SHADOW 1
#endif
#include "../../seqtx.h"
#include "inner.h"

static void inner_add(inner_kernel *list, size_t *n, const stx__micro *m, int isa, int no_denormals,
                      int emulated) {
    inner_kernel *k = list + (*n)++;
    k->name = m->name;
    k->isa = isa;
    k->bf16 = m->kr > 1;
    k->no_denormals = no_denormals;
    k->emulated = emulated;
    k->round = m->to_bf16;
    k->pair = m->pair;
    k->micro = m;
}

size_t inner_kernels(int bf16, inner_kernel *list) {
    size_t n = 0;
    int isa = stx__find_isa();
    (void)isa;
    if (!bf16) {
        inner_add(list, &n, &stx__micro_generic, STX__ISA_BASE, 0, 0);
#ifdef STX__X86
        if (isa >= STX__ISA_AVX2) inner_add(list, &n, &stx__micro_avx2, STX__ISA_AVX2, 0, 0);
        if (isa >= STX__ISA_AVX512) inner_add(list, &n, &stx__micro_avx512, STX__ISA_AVX512, 0, 0);
#endif
#if defined(STX__NEON) && !defined(SEQTX_DOUBLE)
        inner_add(list, &n, &stx__micro_neon, STX__ISA_BASE, 0, 0);
#endif
        return n;
    }
#ifndef SEQTX_DOUBLE
    inner_add(list, &n, &stx__micro_generic_bf16, STX__ISA_BASE, 0, 0);
  #ifdef STX__HAS_BFDOT
    if (stx__has_bfdot()) inner_add(list, &n, &stx__micro_bfdot, STX__ISA_BASE, 0, 0);
  #endif
  #ifdef STX__X86
    if (isa >= STX__ISA_AVX2)
        inner_add(list, &n, &stx__micro_generic_bf16_avx2, STX__ISA_AVX2, 0, 0);
    if (isa >= STX__ISA_AVX512)
        inner_add(list, &n, &stx__micro_generic_bf16_avx512, STX__ISA_AVX512, 0, 0);
    #ifdef STX__BF16
    if (isa >= STX__ISA_AVX512 && __builtin_cpu_supports("avx512bf16"))
        inner_add(list, &n, &stx__micro_avx512_bf16, STX__ISA_AVX512, 1, 0);
    #endif
    #ifdef TEST_AMX_EMULATED
    inner_add(list, &n, &stx__micro_amx, isa, 0, 1);
    #elif defined(STX__AMX)
    if (isa >= STX__ISA_AVX512 && stx__has_amx())
        inner_add(list, &n, &stx__micro_amx, STX__ISA_AVX512, 1, 0);
    #endif
  #endif
#endif
    return n;
}

void inner_use(stx_ctx *x, const inner_kernel *k) {
    x->micro = (const stx__micro *)k->micro;
    x->isa = k->isa;
}

const char *inner_name(const stx_ctx *x) {
    return stx__micro_kernel(x)->name;
}

void inner_poison(stx_ctx *x) {
    size_t i, n = x->threads.scratch ? (size_t)x->desc.threads * STX__SCRATCH : 0;
    for (i = 0; i < n; i++) x->threads.scratch[i] = (stx_real)NAN;
}

void inner_shift2d(stx_ctx *x, stx_real *y, size_t ldy, size_t n, const stx_real *a, size_t lda,
                   size_t w, size_t rows) {
    stx__shift2d(x, y, ldy, n, a, lda, w, rows);
}

void inner_loss_weights(stx_ctx *x, const stx__loss_weights_args *a) {
    stx__loss_weights(x, a);
}

void inner_cluster_sort(stx_ctx *x, const stx__cluster_sort_args *k) {
    stx__cluster_sort(x, k);
}

void inner_cluster_log_probs(stx_ctx *x, const stx__cluster_log_probs_args *a) {
    stx__cluster_log_probs(x, a);
}

void inner_metric_accumulate(stx_ctx *x, double *metric, const stx_real *a, double s,
                             int accumulate) {
    stx__metric_accumulate(x, metric, a, s, accumulate);
}

int inner_isa(const stx_ctx *x) {
    return x->isa;
}

void inner_set_isa(stx_ctx *x, int isa) {
    x->isa = isa;
}

void inner_use_isa(stx_ctx *x, int isa) {
    x->isa = isa;
    x->micro = stx__choose_micro(STX_PREC_F32, isa);
}

uint32_t inner_keep(stx_real p) {
    return stx__keep16(p);
}

#ifndef SEQTX_DOUBLE
uint32_t inner_bf16(stx_real v) {
    return stx__bf16(v);
}
#endif

uint32_t inner_busy(const stx_ctx *x) {
#if defined(STX__PTHREADS) || defined(STX__WIN_THREADS)
    return x->threads.pool ? STX__LOAD(&x->threads.pool->busy) : 0;
#else
    (void)x;
    return 0;
#endif
}

size_t inner_attention_units(stx_ctx *x, const stx_attention_args *a, size_t threads, int back) {
    stx__attn A;
    stx__attn_work w;
    memset(&w, 0, sizeof w);
    stx__attn_plan(&A, x, a);
    stx__attn_units(&A, threads, back, &w);
    return w.count;
}
