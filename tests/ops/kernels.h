/* kernels.h - wraps kernels that take an args struct in functions with positional
   parameters, for tests with many calls. k_NAME calls stx_NAME, and k_NAME_cuda calls
   its CUDA version. Include after seqtx.h. */
#ifndef STX_TEST_KERNELS_H
#define STX_TEST_KERNELS_H
#include <string.h>

/* K_KERNEL(name, kernel, args struct, (parameters), assignments to k) */
#ifdef SEQTX_CUDA
  #define K_KERNEL(name, stem, args, params, ...) \
    K_TWIN(name, stem, args, params, __VA_ARGS__) \
    K_TWIN(name##_cuda, stem##_cuda, args, params, __VA_ARGS__)
#else
  #define K_KERNEL(name, stem, args, params, ...) K_TWIN(name, stem, args, params, __VA_ARGS__)
#endif

#define K_TWIN(name, stem, args, params, ...) \
  static inline void name params { \
    args k; \
    memset(&k, 0, sizeof k); \
    __VA_ARGS__; \
    stem(x, &k); \
  }

/* da (+)= dy b, db += dy a */
K_KERNEL(k_mul_bwd, stx_mul_bwd, stx_mul_bwd_args,
         (stx_ctx * x, stx_real *da, stx_real *db, const stx_real *dy, const stx_real *a,
          const stx_real *b, size_t n, size_t nb, int accumulate),
         k.n = n, k.nb = nb, k.a = a, k.b = b, k.dy = dy, k.da = da, k.db = db,
         k.accumulate = accumulate)

K_KERNEL(k_act_bwd, stx_act_bwd, stx_act_bwd_args,
         (stx_ctx * x, stx_real *da, const stx_real *dy, const stx_real *y, const stx_real *a,
          size_t n, int act, int accumulate),
         k.n = n, k.act = act, k.y = y, k.a = a, k.dy = dy, k.da = da, k.accumulate = accumulate)

K_KERNEL(k_dropout_fwd, stx_dropout_fwd, stx_dropout_args,
         (stx_ctx * x, stx_real *y, const stx_real *a, size_t n, stx_real p, uint64_t seed,
          uint64_t stream, uint64_t first, int accumulate),
         k.n = n, k.p = p, k.seed = seed, k.stream = stream, k.first = first, k.a = a, k.y = y,
         k.accumulate = accumulate)

K_KERNEL(k_rezero_bwd, stx_rezero_bwd, stx_rezero_bwd_args,
         (stx_ctx * x, stx_real *df, stx_real *dalpha, const stx_real *dy, const stx_real *f,
          const stx_real *alpha, size_t n, int accumulate),
         k.n = n, k.f = f, k.alpha = alpha, k.dy = dy, k.df = df, k.dalpha = dalpha,
         k.accumulate = accumulate)

/* stx_residual_norm without the residual branch. */
K_KERNEL(k_layernorm_fwd, stx_residual_norm_fwd, stx_residual_norm_args,
         (stx_ctx * x, stx_real *y, stx_real *mean, stx_real *rstd, const stx_real *in,
          const stx_real *gain, const stx_real *shift, size_t N, size_t C, stx_real eps),
         k.N = N, k.C = C, k.eps = eps, k.h = in, k.gain = gain, k.shift = shift, k.y = y,
         k.mean = mean, k.rstd = rstd)

K_KERNEL(k_layernorm_bwd, stx_residual_norm_bwd, stx_residual_norm_args,
         (stx_ctx * x, stx_real *din, stx_real *dgain, stx_real *dshift, const stx_real *dy,
          stx_real *in, const stx_real *gain, stx_real *mean, stx_real *rstd, size_t N, size_t C,
          int accumulate),
         k.N = N, k.C = C, k.s = in, k.gain = gain, k.mean = mean, k.rstd = rstd, k.dy = dy,
         k.ds = din, k.dgain = dgain, k.dshift = dshift, k.accumulate_ds = accumulate)

K_KERNEL(k_linear_fwd, stx_linear_fwd, stx_linear_args,
         (stx_ctx * x, stx_real *y, stx_real *pre, const stx_real *in, const stx_real *W,
          const stx_real *b, size_t N, size_t Ci, size_t O, int act),
         k.N = N, k.Ci = Ci, k.O = O, k.act = act, k.in = in, k.W = W, k.b = b, k.y = y,
         k.pre = pre)

/* The token loss without weights: the sum of the cross-entropies over a divisor. */
K_KERNEL(k_cross_entropy_fwd, stx_token_loss_fwd, stx_token_loss_args,
         (stx_ctx * x, stx_real *loss, stx_real *row_max, stx_real *inv_sum,
          const stx_real *logits, const int32_t *targets, size_t N, size_t V, size_t ld,
          double divisor),
         k.N = N, k.V = V, k.ld = ld, k.divisor = divisor, k.logits = logits, k.targets = targets,
         k.loss = loss, k.row_max = row_max, k.inv_sum = inv_sum)

K_KERNEL(k_cross_entropy_bwd, stx_token_loss_bwd, stx_token_loss_args,
         (stx_ctx * x, stx_real *dlogits, const stx_real *dloss, stx_real *row_max,
          stx_real *inv_sum, const stx_real *logits, const int32_t *targets, size_t N, size_t V,
          size_t ld, double divisor, int accumulate),
         k.N = N, k.V = V, k.ld = ld, k.divisor = divisor, k.logits = logits, k.targets = targets,
         k.row_max = row_max, k.inv_sum = inv_sum, k.dloss = dloss, k.dlogits = dlogits,
         k.accumulate = accumulate)

/* The token loss with a weight per token. */
K_KERNEL(k_token_loss_fwd, stx_token_loss_fwd, stx_token_loss_args,
         (stx_ctx * x, stx_real *loss, stx_real *nll, stx_real *row_max, stx_real *inv_sum,
          const stx_real *logits, const int32_t *targets, const stx_real *weights, size_t N,
          size_t V, size_t ld),
         k.N = N, k.V = V, k.ld = ld, k.divisor = 1, k.logits = logits, k.targets = targets,
         k.weights = weights, k.loss = loss, k.nll = nll, k.row_max = row_max,
         k.inv_sum = inv_sum)

K_KERNEL(k_token_loss_bwd, stx_token_loss_bwd, stx_token_loss_args,
         (stx_ctx * x, stx_real *dlogits, const stx_real *dloss, stx_real *row_max,
          stx_real *inv_sum, const stx_real *logits, const int32_t *targets,
          const stx_real *weights, size_t N, size_t V, size_t ld, int accumulate),
         k.N = N, k.V = V, k.ld = ld, k.divisor = 1, k.logits = logits, k.targets = targets,
         k.weights = weights, k.row_max = row_max, k.inv_sum = inv_sum, k.dloss = dloss,
         k.dlogits = dlogits, k.accumulate = accumulate)

#endif
