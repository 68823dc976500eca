/* test_shim.cpp - tests of the host implementation of CUDA ("the shim"): correct kernels
   give correct results in every order of threads and with every fill pattern; each kind
   of incorrect kernel that the shim can detect is reported. */
#include "../../seqtx.h"
#include "cuda_runtime.h"
#include "cuda_bf16.h"
#include "cublasLt.h"
#include "nccl.h"
#include "../test.h"
#include <vector>
#include <signal.h>
#include <stdint.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__)
  #define ASAN 1
#elif defined(__has_feature)
  #if __has_feature(address_sanitizer)
    #define ASAN 1
  #endif
#endif

#define OK(call) \
  do { \
    cudaError_t e_ = (call); \
    CHECK(e_ == cudaSuccess, "%s: %s", #call, cudaGetErrorString(e_)); \
  } while (0)
#define FAILS(call, error) \
  do { \
    cudaError_t e_ = (call); \
    CHECK(e_ == (error), "%s: %s", #call, cudaGetErrorName(e_)); \
    cudaGetLastError(); \
  } while (0)
#define LT(call) \
  do { \
    cublasStatus_t e_ = (call); \
    CHECK(e_ == CUBLAS_STATUS_SUCCESS, "%s: %s", #call, cublasGetStatusString(e_)); \
  } while (0)

static float *device_copy(const std::vector<float> &v) {
    float *p;
    OK(cudaMalloc(&p, v.size() * 4));
    OK(cudaMemcpy(p, v.data(), v.size() * 4, cudaMemcpyHostToDevice));
    return p;
}

template <class T> static std::vector<T> host_copy(const T *p, size_t n) {
    std::vector<T> v(n);
    OK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
}

static std::vector<float> random_floats(size_t n) {
    std::vector<float> v(n);
    for (auto &x : v) x = (float)test_rand();
    return v;
}

/* Runs `body` in every order of threads and blocks and with three fill patterns. The
   shim must report nothing. */
template <class F> static void in_every_order(F body) {
    static const int fills[] = {CUDA_HOST_FILL_NAN, CUDA_HOST_FILL_RANDOM, 0};
    for (int fill : fills)
        for (int t = 0; t < CUDA_HOST_ORDERS; t++)
            for (int b = 0; b < 3; b++) {
                cuda_host_fill(fill);
                cuda_host_order(t, b, (uint64_t)(7 * t + b));
                body();
            }
    cuda_host_fill(CUDA_HOST_FILL_NAN);
    cuda_host_order(0, 0, 0);
    CHECK(cuda_host_reports() == 0, "%ld reports", cuda_host_reports());
    CHECK(cudaGetLastError() == cudaSuccess, "no error remains");
}

/* Checks that the violation in `body` is reported with a text that contains `word`. */
template <class F> static void is_reported(const char *what, const char *word, F body) {
    cuda_host_clear_reports();
    cuda_host_quiet(1);
    body();
    cuda_host_check();
    cuda_host_quiet(0);
    CHECK(cuda_host_reports() > 0 && strstr(cuda_host_last_report(), word),
          "%s: %ld reports, last: %s", what, cuda_host_reports(), cuda_host_last_report());
    cuda_host_clear_reports();
    cudaGetLastError();
}

/* Checks that a child process that runs `body` fails, with a signal, an
   AddressSanitizer error or exit status 99. */
template <class F> static void kills(const char *what, F body) {
    int status;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        if (!freopen("/dev/null", "w", stderr)) _exit(0);
        body();
        _exit(0);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child
              && !(WIFEXITED(status) && WEXITSTATUS(status) == 0),
          "%s: not detected", what);
}

// --------------------------------------------------------------------------------------
// correct kernels

/* Computes one sum per block. */
static __global__ void sum_kernel(float *out, const float *in, size_t n) {
    STX__SHARED(float, part, 8);
    float s = 0;
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) s += in[blockIdx.x * n + i];
    for (int d = 16; d; d >>= 1) s += __shfl_xor_sync(0xffffffffu, s, d);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = s;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (unsigned w = 1; w < blockDim.x / 32; w++) s += part[w];
        out[blockIdx.x] = s;
    }
}

static void test_sum(void) {
    size_t n = 1000, blocks = 5;
    std::vector<float> in(n * blocks);
    for (auto &x : in) x = (float)(int)(test_rand() * 100);
    float *d = device_copy(in), *out;
    OK(cudaMalloc(&out, blocks * 4));
    in_every_order([&] {
        STX__LAUNCH(sum_kernel, (unsigned)blocks, 256, 0, 0, out, d, n);
        std::vector<float> got = host_copy(out, blocks);
        for (size_t b = 0; b < blocks; b++) {
            float want = 0;
            for (size_t i = 0; i < n; i++) want += in[b * n + i];
            CHECK(got[b] == want, "block %zu: %g, expected %g", b, got[b], want);
        }
    });
    OK(cudaFree(d));
    OK(cudaFree(out));
}

static __global__ void scan_kernel(int *y, const int *a, unsigned long long *wide, double *dbl,
                                   unsigned *votes) {
    int lane = (int)(threadIdx.x & 31), v = a[threadIdx.x], s = v;
    for (unsigned d = 1; d < 32; d *= 2) {
        int t = __shfl_up_sync(0xffffffffu, s, d);
        if (lane >= (int)d) s += t;
    }
    y[threadIdx.x] = s;
    unsigned long long w = (unsigned long long)v << 33 | (unsigned)lane;
    wide[threadIdx.x] = __shfl_sync(0xffffffffu, w, (lane + 3) & 31);
    dbl[threadIdx.x] = __shfl_down_sync(0xffffffffu, (double)lane, 2, 8);
    votes[threadIdx.x * 4] = __ballot_sync(0xffffffffu, v & 1);
    votes[threadIdx.x * 4 + 1] = (unsigned)__any_sync(0xffffffffu, v == 17) << 1
                                 | (unsigned)__all_sync(0xffffffffu, v < 100);
    votes[threadIdx.x * 4 + 2] = lane < 16 ? __reduce_add_sync(0xffffu, (unsigned)v)
                                           : __reduce_max_sync(0xffff0000u, (unsigned)v);
    votes[threadIdx.x * 4 + 3] = (unsigned)__syncthreads_count(v & 1) << 2
                                 | (unsigned)(__syncthreads_or(v == 17) != 0) << 1
                                 | (unsigned)(__syncthreads_and(v < 100) != 0);
}

static void test_scan(void) {
    int *y, *a, host[64];
    unsigned long long *wide;
    double *dbl;
    unsigned *votes;
    unsigned odd = 0;
    for (int i = 0; i < 64; i++) {
        host[i] = i * 7 % 31;
        odd += host[i] & 1;
    }
    OK(cudaMalloc(&y, sizeof host));
    OK(cudaMalloc(&a, sizeof host));
    OK(cudaMalloc(&wide, 512));
    OK(cudaMalloc(&dbl, 512));
    OK(cudaMalloc(&votes, 1024));
    OK(cudaMemcpy(a, host, sizeof host, cudaMemcpyHostToDevice));
    in_every_order([&] {
        STX__LAUNCH((scan_kernel), 1, 64, 0, 0, y, a, wide, dbl, votes);
        std::vector<int> got = host_copy(y, 64);
        std::vector<unsigned long long> w = host_copy(wide, 64);
        std::vector<double> db = host_copy(dbl, 64);
        std::vector<unsigned> v = host_copy(votes, 256);
        for (int i = 0; i < 64; i++) {
            int s = 0, base = i & ~31, lane = i & 31, from = base + ((lane + 3) & 31);
            unsigned ballot = 0, sum = 0, top = 0, any = 0;
            for (int j = base; j <= i; j++) s += host[j];
            for (int j = 0; j < 32; j++) {
                ballot |= (unsigned)(host[base + j] & 1) << j;
                any |= host[base + j] == 17;
            }
            for (int j = 0; j < 16; j++) {
                sum += (unsigned)host[base + j];
                top = max(top, (unsigned)host[base + 16 + j]);
            }
            CHECK(got[(size_t)i] == s, "__shfl_up_sync, thread %d", i);
            CHECK(w[(size_t)i] == ((unsigned long long)host[from] << 33 | (unsigned)(from & 31)),
                  "64-bit shuffle, thread %d", i);
            CHECK(db[(size_t)i] == ((lane & 7) < 6 ? lane + 2 : lane),
                  "shuffle of width 8, thread %d: %g", i, db[(size_t)i]);
            CHECK(v[(size_t)i * 4] == ballot && v[(size_t)i * 4 + 1] == (any << 1 | 1),
                  "votes, thread %d", i);
            CHECK(v[(size_t)i * 4 + 2] == (lane < 16 ? sum : top),
                  "reductions over half a warp, thread %d", i);
            CHECK(v[(size_t)i * 4 + 3] == (odd << 2 | 3), "__syncthreads_count, thread %d", i);
        }
    });
    OK(cudaFree(y));
    OK(cudaFree(a));
    OK(cudaFree(wide));
    OK(cudaFree(dbl));
    OK(cudaFree(votes));
}

template <class T, int PAD>
static __global__ void transpose_kernel(T *y, const T *x, int rows, int cols, int skip_barrier) {
    STX__SHARED(T, tile, 16 * (16 + PAD));
    int c = (int)(blockIdx.x * 16 + threadIdx.x), r = (int)(blockIdx.y * 16 + threadIdx.y);
    if (c < cols && r < rows) tile[threadIdx.y * (16 + PAD) + threadIdx.x] = x[r * cols + c];
    if (!skip_barrier) __syncthreads();
    c = (int)(blockIdx.x * 16 + threadIdx.y);
    r = (int)(blockIdx.y * 16 + threadIdx.x);
    if (c < cols && r < rows) y[c * rows + r] = tile[threadIdx.x * (16 + PAD) + threadIdx.y];
}

static void test_transpose(void) {
    int rows = 45, cols = 67;
    std::vector<float> in = random_floats((size_t)(rows * cols));
    float *x = device_copy(in), *y;
    OK(cudaMalloc(&y, in.size() * 4));
    auto wrong = [&](int skip) {
        int bad = 0;
        STX__LAUNCH((transpose_kernel<float, 1>), dim3(5, 3), dim3(16, 16), 0, 0, y, x, rows, cols,
                    skip);
        std::vector<float> got = host_copy(y, in.size());
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < cols; c++)
                bad += !(got[(size_t)(c * rows + r)] == in[(size_t)(r * cols + c)]);
        return bad;
    };
    in_every_order([&] { CHECK(wrong(0) == 0, "transpose"); });
    for (int t = 0; t < CUDA_HOST_ORDERS; t++) {
        cuda_host_order(t, 0, 1);
        CHECK(wrong(1) > 0, "a missing barrier has no effect, order %d", t);
    }
    cuda_host_order(0, 0, 0);
    OK(cudaFree(x));
    OK(cudaFree(y));
}

/* Fills the fragments element by element from the formulas of the PTX ISA. The shim
   itself computes register by register. */
static __global__ void mma_bf16_kernel(float *D, const float *A, const float *B, const float *C) {
    int lane = (int)threadIdx.x, group = lane >> 2, t = lane % 4;
    uint16_t ea[8], eb[4];
    uint32_t a[4], b[2];
    float c[4];
    for (int i = 0; i < 8; i++) {
        int row = i < 2 || (4 <= i && i < 6) ? group : group + 8,
            col = i < 4 ? t * 2 + (i & 1) : t * 2 + (i & 1) + 8;
        __nv_bfloat16 h = __float2bfloat16(A[row * 16 + col]);
        memcpy(&ea[i], &h, 2);
    }
    for (int i = 0; i < 4; i++) {
        int row = i < 2 ? t * 2 + (i & 1) : t * 2 + (i & 1) + 8;
        __nv_bfloat16 h = __float2bfloat16(B[row * 8 + group]);
        memcpy(&eb[i], &h, 2);
    }
    memcpy(a, ea, sizeof a);
    memcpy(b, eb, sizeof b);
    for (int i = 0; i < 4; i++) c[i] = C[(i < 2 ? group : group + 8) * 8 + t * 2 + (i & 1)];
    cuda_host_mma_bf16(c, a, b);
    for (int i = 0; i < 4; i++) D[(i < 2 ? group : group + 8) * 8 + t * 2 + (i & 1)] = c[i];
}

static __global__ void mma_tf32_kernel(float *D, const float *A, const float *B, const float *C) {
    int lane = (int)threadIdx.x, group = lane >> 2, t = lane % 4;
    uint32_t a[4], b[2];
    float c[4];
    for (int i = 0; i < 4; i++) {
        int row = i == 0 || i == 2 ? group : group + 8, col = i == 0 || i == 1 ? t : t + 4;
        a[i] = __float_as_uint(A[row * 8 + col]);
    }
    for (int i = 0; i < 2; i++) b[i] = __float_as_uint(B[(i == 0 ? t : t + 4) * 8 + group]);
    for (int i = 0; i < 4; i++) c[i] = C[(i < 2 ? group : group + 8) * 8 + t * 2 + (i & 1)];
    cuda_host_mma_tf32(c, a, b);
    for (int i = 0; i < 4; i++) D[(i < 2 ? group : group + 8) * 8 + t * 2 + (i & 1)] = c[i];
}

/* Several products in one call must be bit-identical to separate calls, even if one
   product accumulates into another product's result. */
static __global__ void mma_several_kernel(int *differ, const float *A) {
    int lane = (int)threadIdx.x;
    uint32_t a[2][4], b[2][2];
    float one[2][4], all[2][4];
    /* each register is valid as one tf32 and as two bf16 values */
    for (int i = 0; i < 8; i++)
        a[i / 4][i % 4] = (__float_as_uint(A[lane * 8 + i]) >> 16) * 0x10001u;
    for (int i = 0; i < 4; i++)
        b[i / 2][i % 2] = (__float_as_uint(A[(31 - lane) * 8 + i]) >> 16) * 0x10001u;
    for (int i = 0; i < 8; i++) one[i / 4][i % 4] = all[i / 4][i % 4] = A[255 - lane * 8 - i];
    const cuda_host_product p[4] = {{all[0], a[0], b[0]},
                                    {all[1], a[1], b[0]},
                                    {all[0], a[1], b[1]},
                                    {all[0], a[0], b[1]}};
    cuda_host_mma_bf16(one[0], a[0], b[0]);
    cuda_host_mma_bf16(one[1], a[1], b[0]);
    cuda_host_mma_bf16(one[0], a[1], b[1]);
    cuda_host_mma_bf16(one[0], a[0], b[1]);
    cuda_host_mma_bf16(p, 4);
    differ[lane] = memcmp(one, all, sizeof one);
    cuda_host_mma_tf32(one[0], a[0], b[0]);
    cuda_host_mma_tf32(one[1], a[1], b[0]);
    cuda_host_mma_tf32(one[0], a[1], b[1]);
    cuda_host_mma_tf32(one[0], a[0], b[1]);
    cuda_host_mma_tf32(p, 4);
    differ[32 + lane] = memcmp(one, all, sizeof one);
}

static void test_mma(void) {
    std::vector<float> A = random_floats(16 * 16), B = random_floats(16 * 8),
                       C = random_floats(16 * 8);
    int *differ;
    OK(cudaMalloc(&differ, 64 * sizeof *differ));
    float *a = device_copy(A), *b = device_copy(B), *c = device_copy(C), *d;
    OK(cudaMalloc(&d, 16 * 8 * 4));
    in_every_order([&] {
        STX__LAUNCH(mma_bf16_kernel, 1, 32, 0, 0, d, a, b, c);
        std::vector<float> got = host_copy(d, 16 * 8);
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 8; j++) {
                double s = C[(size_t)(i * 8 + j)];
                for (int k = 0; k < 16; k++)
                    s += (double)(float)__nv_bfloat16(A[(size_t)(i * 16 + k)])
                         * (float)__nv_bfloat16(B[(size_t)(k * 8 + j)]);
                CHECK(CLOSE(got[(size_t)(i * 8 + j)], s, 2e-6), "bf16 (%d,%d): %g, expected %g", i,
                      j, got[(size_t)(i * 8 + j)], s);
            }
        STX__LAUNCH(mma_tf32_kernel, 1, 32, 0, 0, d, a, b, c);
        got = host_copy(d, 16 * 8);
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 8; j++) {
                double s = C[(size_t)(i * 8 + j)];
                for (int k = 0; k < 8; k++)
                    s += (double)__uint_as_float(__float_as_uint(A[(size_t)(i * 8 + k)]) & ~0x1fffu)
                         * __uint_as_float(__float_as_uint(B[(size_t)(k * 8 + j)]) & ~0x1fffu);
                CHECK(CLOSE(got[(size_t)(i * 8 + j)], s, 2e-6), "tf32 (%d,%d): %g, expected %g", i,
                      j, got[(size_t)(i * 8 + j)], s);
            }
        STX__LAUNCH(mma_several_kernel, 1, 32, 0, 0, differ, a);
        int lanes[64];
        OK(cudaMemcpy(lanes, differ, sizeof lanes, cudaMemcpyDeviceToHost));
        for (int i = 0; i < 64; i++)
            CHECK(lanes[i] == 0,
                  "%s, lane %d: one call with several products differs from several calls",
                  i < 32 ? "bf16" : "tf32", i & 31);
    });
    OK(cudaFree(differ));
    OK(cudaFree(a));
    OK(cudaFree(b));
    OK(cudaFree(c));
    OK(cudaFree(d));
}

/* Loads A (16,16) and B through shared memory and ldmatrix, as is usual for mma. B is
   stored as (n,k) = (8,16) or, with trans, as (k,n) = (16,8). */
static __global__ void ldmatrix_kernel(float *D, const __nv_bfloat16 *A, const __nv_bfloat16 *B,
                                       int trans, uint32_t *raw) {
    STX__DYNAMIC(shared);
    __nv_bfloat16 *sa = (__nv_bfloat16 *)shared, *sb = sa + 16 * 24;
    int lane = (int)threadIdx.x, ldb = trans ? 8 : 24;
    uint32_t a[4], b[2], one[1];
    float c[4] = {0, 0, 0, 0};
    for (int i = lane; i < 256; i += 32) sa[i / 16 * 24 + i % 16] = A[i];
    for (int i = lane; i < 128; i += 32)
        if (trans)
            sb[i] = B[i];
        else
            sb[i / 16 * 24 + i % 16] = B[i];
    __syncwarp();
    cuda_host_ldmatrix(a, 4, 0, sa + lane % 16 * 24 + lane / 16 * 8);
    if (trans)
        cuda_host_ldmatrix(b, 2, 1, sb + lane % 16 * ldb);
    else
        cuda_host_ldmatrix(b, 2, 0, sb + lane % 8 * ldb + lane / 8 % 2 * 8);
    cuda_host_ldmatrix(one, 1, trans, sa + lane % 8 * 24);
    raw[lane] = one[0];
    cuda_host_mma_bf16(c, a, b);
    for (int i = 0; i < 4; i++)
        D[((lane >> 2) + (i < 2 ? 0 : 8)) * 8 + lane % 4 * 2 + (i & 1)] = c[i];
}

static void test_ldmatrix(void) {
    std::vector<__nv_bfloat16> A(256), B(128);
    for (auto &x : A) x = __nv_bfloat16((float)(int)(test_rand() * 16));
    for (auto &x : B) x = __nv_bfloat16((float)(int)(test_rand() * 16));
    __nv_bfloat16 *a, *b;
    float *d;
    uint32_t *raw;
    OK(cudaMalloc(&a, 512));
    OK(cudaMalloc(&b, 256));
    OK(cudaMalloc(&d, 512));
    OK(cudaMalloc(&raw, 128));
    OK(cudaMemcpy(a, A.data(), 512, cudaMemcpyHostToDevice));
    OK(cudaMemcpy(b, B.data(), 256, cudaMemcpyHostToDevice));
    in_every_order([&] {
        for (int trans = 0; trans < 2; trans++) {
            STX__LAUNCH(ldmatrix_kernel, 1, 32, (16 + 16) * 24 * 2, 0, d, a, b, trans, raw);
            std::vector<float> got = host_copy(d, 128);
            std::vector<uint32_t> r = host_copy(raw, 32);
            for (int i = 0; i < 16; i++)
                for (int j = 0; j < 8; j++) {
                    float s = 0;
                    for (int k = 0; k < 16; k++)
                        s += (float)A[(size_t)(i * 16 + k)]
                             * (float)B[(size_t)(trans ? k * 8 + j : j * 16 + k)];
                    CHECK(got[(size_t)(i * 8 + j)] == s,
                          "ldmatrix, trans %d (%d,%d): %g, expected %g", trans, i, j,
                          got[(size_t)(i * 8 + j)], s);
                }
            for (int l = 0; l < 32; l++)
                for (int h = 0; h < 2; h++) {
                    int p = l / 4, q = 2 * (l % 4) + h;
                    unsigned want = trans ? __bfloat16_as_ushort(A[(size_t)(q * 16 + p)])
                                          : __bfloat16_as_ushort(A[(size_t)(p * 16 + q)]);
                    CHECK((r[(size_t)l] >> 16 * h & 0xffffu) == want,
                          "ldmatrix x1, trans %d, lane %d", trans, l);
                }
        }
    });
    OK(cudaFree(a));
    OK(cudaFree(b));
    OK(cudaFree(d));
    OK(cudaFree(raw));
}

/* Computes row sums with double buffering. `wrong` selects a mistake: 0 none, 1 a missing
   wait, 2 a missing barrier after the wait, 3 a missing barrier before reuse. */
static __global__ void async_kernel(float *out, const float *in, int tiles, int n, int wrong) {
    STX__SHARED(float, buffer, 2 * 128);
    int t = (int)threadIdx.x;
    float s = 0;
    auto fetch = [&](int tile) {
        int at = tile * 128 + t * 4, bytes = min(max(n - at, 0), 4) * 4;
        if (tile < tiles)
            cuda_host_cp_async(&buffer[tile % 2 * 128 + t * 4], bytes ? in + at : in, 16, bytes);
        cuda_host_cp_commit();
    };
    fetch(0);
    for (int i = 0; i < tiles; i++) {
        fetch(i + 1);
        if (wrong != 1) cuda_host_cp_wait(1);
        if (wrong != 2) __syncthreads();
        for (int j = 0; j < 4; j++) s += buffer[i % 2 * 128 + (t + 7) % 32 * 4 + j];
        if (wrong != 3) __syncthreads();
    }
    out[t] = s;
}

STX__GLOBAL(32) async_nothing_kernel(float *out, const float *from) {
    STX__SHARED(float, buffer, 128);
    cuda_host_cp_async(&buffer[threadIdx.x * 4], from, 16, 0);
    cuda_host_cp_commit();
    cuda_host_cp_wait(0);
    out[threadIdx.x] = buffer[threadIdx.x * 4 + 3];
}

static void test_async(void) {
    int n = 5 * 128 + 37, tiles = 6;
    std::vector<float> in((size_t)n);
    for (auto &x : in) x = (float)(int)(test_rand() * 100);
    float *x = device_copy(in), *out;
    OK(cudaMalloc(&out, 32 * 4));
    auto wrong = [&](int how) {
        int bad = 0;
        STX__LAUNCH(async_kernel, 1, 32, 0, 0, out, x, tiles, n, how);
        std::vector<float> got = host_copy(out, 32);
        for (int t = 0; t < 32; t++) {
            float s = 0;
            for (int i = 0; i < tiles; i++)
                for (int j = 0; j < 4; j++) {
                    int at = i * 128 + (t + 7) % 32 * 4 + j;
                    if (at < n) s += in[(size_t)at];
                }
            bad += !(got[(size_t)t] == s);
        }
        return bad;
    };
    in_every_order([&] { CHECK(wrong(0) == 0, "cp.async"); });
    for (int how = 1; how <= 3; how++) {
        int seen = 0;
        for (int t = 0; t < CUDA_HOST_ORDERS; t++) {
            cuda_host_order(t, 0, 3);
            seen += wrong(how) > 0;
        }
        CHECK(seen > 0, "cp.async with mistake %d: the result is correct in all orders", how);
    }
    cuda_host_order(0, 0, 0);
    STX__LAUNCH(async_nothing_kernel, 1, 32, 0, 0, out, x);
    CHECK(host_copy(out, 32)[31] == 0, "cp.async that reads 0 of 16 bytes");
    is_reported("cp.async of 0 bytes from outside of device memory", "is not in device memory",
                [&] { STX__LAUNCH(async_nothing_kernel, 1, 32, 0, 0, out, x + (1 << 20)); });
    is_reported("cp.async of 0 bytes from an unaligned address", "not aligned",
                [&] { STX__LAUNCH(async_nothing_kernel, 1, 32, 0, 0, out, x + 1); });
    OK(cudaFree(x));
    OK(cudaFree(out));
}

struct scale_args {
    const float *x;
    float *y;
    double s;
    int n, m;
    char rest[200];
};

static __global__ void scale_kernel(const scale_args a, const float *extra) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < a.n) a.y[i] = (float)(a.s * a.x[i]) + (extra ? extra[i] : 0);
}

static __global__ void empty_kernel(void) {}

template <int T> STX__GLOBAL(T) bound_kernel(unsigned *n) {
    atomicAdd(n, 1u);
}

STX__GLOBAL(256, 2) bound_with_blocks_kernel(unsigned *n) {
    atomicAdd(n, 1u);
}

static __global__ void count_kernel(unsigned *n) {
    atomicAdd(n, 1u);
    if (threadIdx.x == 0) atomicMax(n + 1, blockIdx.x);
}

// --------------------------------------------------------------------------------------
// graphs

/* Two streams, two events and four arrays of 64 floats. */
struct graph_setup {
    cudaStream_t s, s2;
    cudaEvent_t e, e2;
    float *a, *b, *c, *pinned;
};

static graph_setup graph_begin(void) {
    graph_setup t;
    t.a = device_copy(std::vector<float>(64, 1.0f));
    OK(cudaMalloc(&t.b, 256));
    OK(cudaMalloc(&t.c, 256));
    OK(cudaMallocHost(&t.pinned, 256));
    OK(cudaStreamCreateWithFlags(&t.s, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&t.s2, cudaStreamNonBlocking));
    OK(cudaEventCreateWithFlags(&t.e, cudaEventDisableTiming));
    OK(cudaEventCreate(&t.e2));
    for (int i = 0; i < 64; i++) t.pinned[i] = 10;
    return t;
}

static void graph_end(const graph_setup &t) {
    OK(cudaEventDestroy(t.e));
    OK(cudaEventDestroy(t.e2));
    OK(cudaStreamDestroy(t.s));
    OK(cudaStreamDestroy(t.s2));
    OK(cudaFree(t.a));
    OK(cudaFree(t.b));
    OK(cudaFree(t.c));
    OK(cudaFreeHost(t.pinned));
}

/* Enqueues c = 2 * 3 a + pinned. The second kernel runs on another stream. */
static void capture_work(const graph_setup &t) {
    scale_args args;
    memset(&args, 0, sizeof args);
    args.x = t.a;
    args.y = t.b;
    args.s = 3;
    args.n = 64;
    STX__LAUNCH(scale_kernel, 2, 32, 0, t.s, args, NULL);
    args.x = t.b;
    args.y = t.c;
    args.s = 2; /* the first launch keeps a copy of args */
    OK(cudaMemcpyAsync(t.a, t.pinned, 256, cudaMemcpyHostToDevice, t.s));
    OK(cudaEventRecord(t.e, t.s));
    OK(cudaStreamWaitEvent(t.s2, t.e, 0));
    STX__LAUNCH(scale_kernel, 2, 32, 0, t.s2, args, t.a);
    OK(cudaEventRecord(t.e2, t.s2));
    OK(cudaStreamWaitEvent(t.s, t.e2, 0));
    OK(cudaMemsetAsync(t.b, 0, 256, t.s));
}

static void test_replay(const graph_setup &t) {
    cudaGraph_t g;
    cudaGraphExec_t x;
    cudaStreamCaptureStatus status;
    size_t nodes = 0;
    OK(cudaStreamBeginCapture(t.s, cudaStreamCaptureModeGlobal));
    OK(cudaStreamIsCapturing(t.s, &status));
    CHECK(status == cudaStreamCaptureStatusActive, "the stream is capturing");
    long launches = cuda_host_launches();
    capture_work(t);
    OK(cudaStreamEndCapture(t.s, &g));
    CHECK(cuda_host_launches() == launches, "nothing runs while a stream captures");
    OK(cudaGraphGetNodes(g, NULL, &nodes));
    CHECK(nodes == 4, "%zu nodes, expected 4", nodes);
    OK(cudaGraphInstantiate(&x, g, 0));
    OK(cudaGraphDestroy(g));
    OK(cudaGraphUpload(x, t.s));
    for (int round = 0; round < 3; round++) {
        std::vector<float> now(64, (float)round);
        OK(cudaMemcpy(t.a, now.data(), 256, cudaMemcpyHostToDevice));
        for (int i = 0; i < 64; i++) t.pinned[i] = (float)(10 * round);
        OK(cudaGraphLaunch(x, t.s));
        OK(cudaStreamSynchronize(t.s));
        CHECK(host_copy(t.c, 64)[63] == 6.0f * (float)round + 10.0f * (float)round,
              "replay %d: %g", round, host_copy(t.c, 64)[63]);
        CHECK(host_copy(t.b, 64)[0] == 0, "the memset of the graph");
    }
    CHECK(cuda_host_graph_launches() == 3, "three graph launches are counted");
    OK(cudaGraphExecDestroy(x));
}

/* Each of these calls must invalidate a capture. */
static void test_forbidden_in_capture(const graph_setup &t) {
    float *p = NULL, y[64];
    const struct {
        const char *name;
        cudaError_t expected;
        std::function<cudaError_t()> call;
    } forbidden[] = {
        {"cudaMalloc", cudaErrorStreamCaptureUnsupported, [&] { return cudaMalloc(&p, 16); }},
        {"cudaFree", cudaErrorStreamCaptureUnsupported, [&] { return cudaFree(t.c); }},
        {"cudaStreamSynchronize", cudaErrorStreamCaptureUnsupported,
         [&] { return cudaStreamSynchronize(t.s); }},
        {"cudaDeviceSynchronize", cudaErrorStreamCaptureUnsupported,
         [] { return cudaDeviceSynchronize(); }},
        {"cudaMemcpy", cudaErrorStreamCaptureUnsupported,
         [&] { return cudaMemcpy(y, t.c, 256, cudaMemcpyDeviceToHost); }},
        {"cudaEventQuery", cudaErrorCapturedEvent, [&] { return cudaEventQuery(t.e); }},
        {"cudaEventSynchronize", cudaErrorCapturedEvent,
         [&] { return cudaEventSynchronize(t.e); }},
        {"cudaStreamQuery", cudaErrorStreamCaptureUnsupported,
         [&] { return cudaStreamQuery(t.s); }},
    };
    for (auto &f : forbidden) {
        cudaGraph_t g;
        OK(cudaStreamBeginCapture(t.s, cudaStreamCaptureModeGlobal));
        OK(cudaEventRecord(t.e, t.s));
        cudaError_t error = f.call();
        CHECK(error == f.expected, "%s while capturing: %s", f.name, cudaGetErrorName(error));
        STX__LAUNCH(empty_kernel, 1, 1, 0, t.s);
        cudaGetLastError();
        FAILS(cudaStreamEndCapture(t.s, &g), cudaErrorStreamCaptureInvalidated);
        CHECK(g == NULL, "an invalid capture returns no graph");
    }
}

static void test_graph(void) {
    graph_setup t = graph_begin();
    cudaGraph_t g;
    float *p;
    test_replay(t);
    test_forbidden_in_capture(t);

    /* a fork that is not joined */
    OK(cudaStreamBeginCapture(t.s, cudaStreamCaptureModeGlobal));
    OK(cudaEventRecord(t.e, t.s));
    OK(cudaStreamWaitEvent(t.s2, t.e, 0));
    STX__LAUNCH(empty_kernel, 1, 1, 0, t.s2);
    FAILS(cudaStreamEndCapture(t.s, &g), cudaErrorStreamCaptureUnjoined);

    /* a relaxed capture allows cudaMalloc */
    OK(cudaStreamBeginCapture(t.s, cudaStreamCaptureModeRelaxed));
    OK(cudaMalloc(&p, 16));
    OK(cudaStreamEndCapture(t.s, &g));
    OK(cudaFree(p));
    OK(cudaGraphDestroy(g));
    graph_end(t);
    CHECK(cuda_host_reports() == 0, "%ld reports", cuda_host_reports());
}

// --------------------------------------------------------------------------------------
// cublasLt

/* The bytes of elements of type float or bf16. */
typedef std::vector<unsigned char> byte_vector;

static size_t size_of(int type) {
    return type == CUDA_R_32F ? 4 : 2;
}

static float read_any(const byte_vector &v, size_t i, int type) {
    float f;
    unsigned short h;
    if (type == CUDA_R_32F) {
        memcpy(&f, &v[4 * i], 4);
        return f;
    }
    memcpy(&h, &v[2 * i], 2);
    return cuda_host_from_bf16(h);
}

static byte_vector random_any(size_t count, int type) {
    byte_vector v(count * size_of(type));
    for (size_t i = 0; i < count; i++) {
        float f = (float)test_rand();
        unsigned short h = cuda_host_to_bf16(f);
        if (type == CUDA_R_32F)
            memcpy(&v[4 * i], &f, 4);
        else
            memcpy(&v[2 * i], &h, 2);
    }
    return v;
}

static double gelu_of(double x) {
    return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
}

static double gelu_slope_of(double x) {
    return (gelu_of(x + 1e-5) - gelu_of(x - 1e-5)) / 2e-5;
}

/* The bits of the epilogues. */
enum {
    RELU = 2,
    BIAS = 4,
    DRELU = 8,
    BGRAD = 16,
    GELU = 32,
    DGELU = 64,
    AUX = 128,
    BGRADA = 256,
    BGRADB = 512
};

/* A test of D (m,n) = 0.75 op(A) op(B) + beta C with an epilogue, in place (C = D). */
struct matmul_test {
    int in_type, out_type, ta, tb, row_major;
    uint32_t epilogue;
    float beta;
    int batch;

    size_t m, n, k, lda, ldb, ldd, sa, sb, sd, aux_ld; /* sa, sb, sd: batch strides */
    byte_vector A, B, C, bias, aux, D, bias_after, aux_after;
    void *a, *b, *d, *pbias, *paux; /* on the device */

    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t Al, Bl, Dl;
    cublasLtMatmulPreference_t pref;
    cublasLtMatmulHeuristicResult_t results[8];
    int found;

    void make_data(void);
    void make_descriptors(void);
    void make_layouts(void);
    void find_algorithm(void);
    cublasStatus_t matmul(const void *at, const cublasLtMatmulAlgo_t *algo) const;
    cublasStatus_t heuristic(void);
    double elem(const byte_vector &v, size_t q, size_t stride, size_t ld, int trans, size_t i,
                size_t j, int type) const;
    double sum(size_t q, size_t i, size_t j) const;
    long check_epilogue(size_t i, size_t j, double *s) const;
    void check_result(void);
    void check_bias_gradient(const std::vector<double> &column_sum) const;
    void check_counters(void);
    void check_in_place_scheme(void);
    void check_refusals(void);
    void check_strides(void);
    void free_all(void);
};

void matmul_test::make_data(void) {
    /* number and length of the contiguous lines of A, B and D */
    size_t lines_a, lines_b, lines_d, length_a, length_b, length_d;
    m = 37;
    n = 29;
    k = 21;
    length_a = (row_major ? !ta : ta) ? k : m;
    lines_a = (row_major ? !ta : ta) ? m : k;
    length_b = (row_major ? !tb : tb) ? n : k;
    lines_b = (row_major ? !tb : tb) ? k : n;
    length_d = row_major ? n : m;
    lines_d = row_major ? m : n;
    lda = length_a + 3;
    ldb = length_b + 2;
    ldd = length_d + 1;
    sa = lda * lines_a + 5;
    sb = ldb * lines_b + 1;
    sd = ldd * lines_d + 4;
    aux_ld = epilogue & (GELU | DGELU) ? 40 : 128;
    size_t size = size_of(out_type);
    size_t aux_bytes = epilogue & (GELU | DGELU) ? aux_ld * n * size : aux_ld / 8 * n;

    A = random_any(sa * (size_t)batch, in_type);
    B = random_any(sb * (size_t)batch, in_type);
    C = random_any(sd * (size_t)batch, out_type);
    bias = random_any(m > n ? m : n, out_type);
    aux = random_any(aux_bytes / size + 1, out_type);
    OK(cudaMalloc(&a, A.size()));
    OK(cudaMalloc(&b, B.size()));
    OK(cudaMalloc(&d, C.size()));
    OK(cudaMalloc(&pbias, bias.size()));
    OK(cudaMalloc(&paux, aux.size()));
    OK(cudaMemcpy(a, A.data(), A.size(), cudaMemcpyHostToDevice));
    OK(cudaMemcpy(b, B.data(), B.size(), cudaMemcpyHostToDevice));
    OK(cudaMemcpy(d, C.data(), C.size(), cudaMemcpyHostToDevice));
    OK(cudaMemcpy(pbias, bias.data(), bias.size(), cudaMemcpyHostToDevice));
    OK(cudaMemcpy(paux, aux.data(), aux.size(), cudaMemcpyHostToDevice));
}

template <class T>
static void set(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attr, T value) {
    LT(cublasLtMatmulDescSetAttribute(desc, attr, &value, sizeof value));
}

template <class T>
static void set(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attr, T value) {
    LT(cublasLtMatrixLayoutSetAttribute(layout, attr, &value, sizeof value));
}

void matmul_test::make_descriptors(void) {
    LT(cublasLtCreate(&handle));
    LT(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    set(desc, CUBLASLT_MATMUL_DESC_TRANSA, (int32_t)(ta ? CUBLAS_OP_T : CUBLAS_OP_N));
    set(desc, CUBLASLT_MATMUL_DESC_TRANSB, (int32_t)(tb ? CUBLAS_OP_T : CUBLAS_OP_N));
    set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
    set(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, pbias);
    set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, paux);
    set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)aux_ld);
}

void matmul_test::make_layouts(void) {
    LT(cublasLtMatrixLayoutCreate(&Al, (cudaDataType)in_type, ta ? k : m, ta ? m : k,
                                  (int64_t)lda));
    LT(cublasLtMatrixLayoutCreate(&Bl, (cudaDataType)in_type, tb ? n : k, tb ? k : n,
                                  (int64_t)ldb));
    LT(cublasLtMatrixLayoutCreate(&Dl, (cudaDataType)out_type, m, n, (int64_t)ldd));
    cublasLtMatrixLayout_t layouts[] = {Al, Bl, Dl};
    int64_t strides[] = {(int64_t)sa, (int64_t)sb, (int64_t)sd};
    for (int i = 0; i < 3; i++) {
        if (row_major)
            set(layouts[i], CUBLASLT_MATRIX_LAYOUT_ORDER, (int32_t)CUBLASLT_ORDER_ROW);
        set(layouts[i], CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, (int32_t)batch);
        set(layouts[i], CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, strides[i]);
    }
}

cublasStatus_t matmul_test::heuristic(void) {
    return cublasLtMatmulAlgoGetHeuristic(handle, desc, Al, Bl, Dl, Dl, pref, 8, results, &found);
}

/* Computes the matmul, with the matrix A at address `at`. */
cublasStatus_t matmul_test::matmul(const void *at, const cublasLtMatmulAlgo_t *algo) const {
    float alpha = 0.75f;
    return cublasLtMatmul(handle, desc, &alpha, at, Al, b, Bl, &beta, d, Dl, d, Dl, algo, NULL, 0,
                          0);
}

void matmul_test::find_algorithm(void) {
    const cublasLtMatmulPreferenceAttributes_t mask = CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK;
    uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_MASK + 1;
    LT(cublasLtMatmulPreferenceCreate(&pref));
    CHECK(cublasLtMatmulPreferenceSetAttribute(pref, mask, &schemes, sizeof schemes)
              == CUBLAS_STATUS_INVALID_VALUE,
          "an unknown reduction scheme is invalid");
    schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    LT(cublasLtMatmulPreferenceSetAttribute(pref, mask, &schemes, sizeof schemes));
    LT(heuristic());
    CHECK(found > 0 && found < 8 && results[0].state == CUBLAS_STATUS_SUCCESS
              && results[0].workspaceSize == 0,
          "%d algorithms", found);
}

/* Returns element (i,j) of op(matrix q). */
double matmul_test::elem(const byte_vector &v, size_t q, size_t stride, size_t ld, int trans,
                         size_t i, size_t j, int type) const {
    if (trans) std::swap(i, j);
    return (double)read_any(v, q * stride + (row_major ? i * ld + j : j * ld + i), type);
}

/* Returns element (i,j) of result q before the epilogue. */
double matmul_test::sum(size_t q, size_t i, size_t j) const {
    double s = 0;
    for (size_t p = 0; p < k; p++)
        s += elem(A, q, sa, lda, ta, i, p, in_type) * elem(B, q, sb, ldb, tb, p, j, in_type);
    s *= 0.75;
    return beta != 0 ? s + beta * elem(C, q, sd, ldd, 0, i, j, out_type) : s;
}

/* Applies the epilogue to *s, which is element (i,j). Returns the number of wrong
   values in aux. */
long matmul_test::check_epilogue(size_t i, size_t j, double *s) const {
    double tol = out_type == CUDA_R_32F ? 1e-5 : 1e-2;
    size_t at = j * aux_ld + i, byte = at / 8 < aux.size() ? at / 8 : 0;
    int bit_before = aux[byte] >> (at & 7) & 1, bit_after = aux_after[byte] >> (at & 7) & 1;
    long bad = 0;
    if (epilogue & BIAS) *s += read_any(bias, i, out_type);
    if (epilogue & RELU) {
        if ((epilogue & AUX) && fabs(*s) > 1e-4) bad += bit_after != (*s > 0);
        *s = *s > 0 ? *s : 0;
    }
    if ((epilogue & DRELU) && !bit_before) *s = 0;
    if (epilogue & GELU) {
        if (epilogue & AUX) bad += !CLOSE(read_any(aux_after, at, out_type), *s, tol);
        *s = gelu_of(*s);
    }
    if (epilogue & DGELU) *s *= gelu_slope_of(read_any(aux, at, out_type));
    return bad;
}

void matmul_test::check_result(void) {
    double tol = out_type == CUDA_R_32F ? 1e-5 : 1e-2;
    std::vector<double> column_sum(m, 0.0);
    long bad = 0;
    D.resize(C.size());
    bias_after.resize(bias.size());
    aux_after.resize(aux.size());
    OK(cudaMemcpy(D.data(), d, D.size(), cudaMemcpyDeviceToHost));
    OK(cudaMemcpy(bias_after.data(), pbias, bias.size(), cudaMemcpyDeviceToHost));
    OK(cudaMemcpy(aux_after.data(), paux, aux.size(), cudaMemcpyDeviceToHost));
    for (size_t q = 0; q < (size_t)batch; q++)
        for (size_t i = 0; i < m; i++)
            for (size_t j = 0; j < n; j++) {
                double s = sum(q, i, j);
                bad += check_epilogue(i, j, &s);
                column_sum[i] += s;
                bad += !CLOSE(elem(D, q, sd, ldd, 0, i, j, out_type), s, tol);
            }
    CHECK(bad == 0,
          "types %d %d, transposed %d %d, row-major %d, epilogue %u, beta %g, batch %d: %ld wrong",
          in_type, out_type, ta, tb, row_major, epilogue, beta, batch, bad);
    check_bias_gradient(column_sum);
}

void matmul_test::check_bias_gradient(const std::vector<double> &column_sum) const {
    double tol = out_type == CUDA_R_32F ? 1e-5 : 1e-2;
    long bad = 0;
    for (size_t i = 0; (epilogue & BGRAD) && i < m; i++)
        bad += !CLOSE(read_any(bias_after, i, out_type), column_sum[i], tol);
    for (size_t i = 0; (epilogue & BGRADA) && i < m; i++) {
        double s = 0;
        for (size_t p = 0; p < k; p++) s += elem(A, 0, sa, lda, ta, i, p, in_type);
        bad += !CLOSE(read_any(bias_after, i, out_type), s, tol);
    }
    for (size_t j = 0; (epilogue & BGRADB) && j < n; j++) {
        double s = 0;
        for (size_t p = 0; p < k; p++) s += elem(B, 0, sb, ldb, tb, p, j, in_type);
        bad += !CLOSE(read_any(bias_after, j, out_type), s, tol);
    }
    CHECK(bad == 0, "bias gradient, epilogue %u: %ld wrong", epilogue, bad);
}

void matmul_test::check_counters(void) {
    long reports = cuda_host_reports(), calls = cuda_host_matmuls(), batches = cuda_host_batches(),
         unaligned = cuda_host_unaligned();
    LT(matmul(a, &results[0].algo));
    CHECK(cuda_host_matmuls() == calls + 1 && cuda_host_batches() == batches + (batch > 1)
              && cuda_host_reports() == reports,
          "the counters of matmuls and batches");
    CHECK(cuda_host_unaligned() == unaligned + 1,
          "an unaligned matmul is counted: m %zu n %zu k %zu, ld %zu %zu %zu", m, n, k, lda, ldb,
          ldd);
    CHECK(matmul((char *)a + 16, &results[0].algo) == CUBLAS_STATUS_INVALID_VALUE,
          "an operand that is aligned less than requested is invalid");
}

/* A run of an algorithm that adds partial sums in place must be reported. Results of a
   batch that overlap must be refused as invalid. */
void matmul_test::check_in_place_scheme(void) {
    long reports = cuda_host_reports();
    uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_MASK;
    LT(cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                            &schemes, sizeof schemes));
    LT(heuristic());
    cuda_host_quiet(1);
    LT(matmul(a, &results[0].algo));
    CHECK(cuda_host_reports() == reports + 1, "partial sums added in place are not reported");
    set(Dl, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, (int64_t)ldd);
    if (batch > 1 && (row_major ? m : n) > 1)
        CHECK(matmul(a, NULL) == CUBLAS_STATUS_INVALID_VALUE, "overlapping results are invalid");
    set(Dl, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, (int64_t)sd);
    cuda_host_clear_reports();
    cuda_host_quiet(0);
}

void matmul_test::check_refusals(void) {
    if (batch == 1) return;
    cuda_host_refuse(CUDA_HOST_REFUSE_PLANS);
    CHECK(heuristic() == CUBLAS_STATUS_NOT_SUPPORTED, "the heuristic refuses batches");
    cuda_host_refuse(CUDA_HOST_REFUSE_CALLS);
    CHECK(matmul(a, NULL) == CUBLAS_STATUS_NOT_SUPPORTED, "calls refuse batches");
    cuda_host_refuse(CUDA_HOST_REFUSE_NOTHING);
}

/* Strides that are too small must be invalid. */
void matmul_test::check_strides(void) {
    if (epilogue & AUX) {
        set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)aux_ld - 4);
        CHECK(matmul(a, NULL) == CUBLAS_STATUS_INVALID_VALUE, "aux ld");
        set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)aux_ld);
    }
    set(Al, CUBLASLT_MATRIX_LAYOUT_LD, (int64_t)lda - 3 - 1);
    CHECK(matmul(a, NULL) == CUBLAS_STATUS_INVALID_VALUE, "lda, call");
    CHECK(heuristic() == CUBLAS_STATUS_INVALID_VALUE, "lda, heuristic");
}

void matmul_test::free_all(void) {
    LT(cublasLtMatmulPreferenceDestroy(pref));
    for (auto l : {Al, Bl, Dl}) LT(cublasLtMatrixLayoutDestroy(l));
    LT(cublasLtMatmulDescDestroy(desc));
    LT(cublasLtDestroy(handle));
    OK(cudaFree(a));
    OK(cudaFree(b));
    OK(cudaFree(d));
    OK(cudaFree(pbias));
    OK(cudaFree(paux));
}

static void test_matmul(int in_type, int out_type, int ta, int tb, int row_major,
                        uint32_t epilogue, float beta, int batch) {
    matmul_test t = {};
    t.in_type = in_type;
    t.out_type = out_type;
    t.ta = ta;
    t.tb = tb;
    t.row_major = row_major;
    t.epilogue = epilogue;
    t.beta = beta;
    t.batch = batch;
    t.make_data();
    t.make_descriptors();
    t.make_layouts();
    t.find_algorithm();
    LT(t.matmul(t.a, &t.results[0].algo));
    t.check_result();
    if (epilogue == CUBLASLT_EPILOGUE_DEFAULT) {
        t.check_counters();
        t.check_in_place_scheme();
        t.check_refusals();
    }
    t.check_strides();
    t.free_all();
}

static void test_cublaslt(void) {
    static const uint32_t epilogues[] = {
        RELU, RELU | AUX, BIAS, RELU | BIAS, RELU | AUX | BIAS, DRELU | AUX, DRELU | AUX | BGRAD,
        GELU, GELU | AUX, GELU | BIAS, GELU | AUX | BIAS, DGELU | AUX, DGELU | AUX | BGRAD,
        BGRADA, BGRADB};
    static const int types[][2] = {{CUDA_R_32F, CUDA_R_32F},
                                   {CUDA_R_16BF, CUDA_R_16BF},
                                   {CUDA_R_16BF, CUDA_R_32F}};
    for (auto &t : types) {
        for (int i = 0; i < 16; i++)
            test_matmul(t[0], t[1], i & 1, i >> 1 & 1, i >> 2 & 1, CUBLASLT_EPILOGUE_DEFAULT,
                        i & 8 ? 0.5f : 0, i & 8 ? 1 : 3);
        for (uint32_t e : epilogues) test_matmul(t[0], t[1], 1, 0, 0, e, 0.5f, 1);
    }
    CHECK(cuda_host_reports() == 0, "reports: %s", cuda_host_last_report());
}

// --------------------------------------------------------------------------------------
// incorrect kernels

static __global__ void diverge_kernel(float *y, int how) {
    unsigned t = threadIdx.x;
    if (how == 0 && t >= 16) return;
    if (how == 0) __syncthreads();
    if (how == 1) {
        if (t < 32)
            __syncthreads();
        else
            __syncthreads();
    }
    if (how == 2 && t < 32) __syncthreads();
    if (how == 3 && t % 32 < 16) y[0] = __shfl_sync(0xffffffffu, 1.0f, 0);
    if (how == 4 && t % 32 != 5) __syncwarp();
    if (how == 5) __syncwarp(0xffffu);
    if (how == 6) {
        if (t & 1)
            __syncthreads();
        else
            __syncwarp();
    }
    if (how == 7) {
        if (t & 1)
            y[t] = __shfl_sync(0xffffffffu, 1.0f, 0);
        else
            y[t] = __shfl_sync(0xffffffffu, 2.0f, 0);
    }
    if (how == 8) {
        if (t & 1)
            __syncwarp();
        else
            y[t] = __shfl_sync(0xffffffffu, 2.0f, 0);
    }
    if (how == 9) y[t] = __shfl_xor_sync(0xffffffffu, 1.0f, 1, 12);
    y[t] = 1;
}

static __global__ void fragment_kernel(int how) {
    STX__SHARED(uint32_t, s, 512);
    uint32_t r[4] = {0, 0, 0, 0};
    float c[4] = {0, 0, 0, 0};
    s[threadIdx.x] = 0;
    __syncthreads();
    if (how == 0) cuda_host_ldmatrix(r, 4, 0, s + threadIdx.x * 4 + 1);
    if (how == 1) cuda_host_ldmatrix(r, 4, 0, (const char *)s + 2048 - 16 * threadIdx.x);
    if (how == 2) cuda_host_mma_bf16(c, r, r);
    if (how == 3) cuda_host_cp_async((char *)s + 4, s, 16);
    if (how == 4) cuda_host_cp_async(s, s, 16);
    if (how == 5) {
        alignas(16) float local[4] = {0, 0, 0, 0};
        cuda_host_cp_async(local, s, 16);
    }
    if (how == 6) cuda_host_cp_async(s, s, 12);
    if (how == 7) __trap();
    const cuda_host_product product[9] = {{c, r, r}, {c, r, r}};
    if (how == 8) cuda_host_mma_tf32(product, threadIdx.x % 2 ? 2 : 1);
    if (how == 9) cuda_host_mma_tf32(product, 9);
}

static __global__ void overrun_kernel(float *y, int at, int read, int dynamic) {
    STX__SHARED(float, s, 10);
    STX__DYNAMIC(d);
    float *p = dynamic ? (float *)d : s;
    s[threadIdx.x] = 0;
    if (read)
        y[0] = p[at];
    else
        p[at] = 3;
}

static __global__ void uninitialised_kernel(float *y) {
    STX__SHARED(float, s, 32);
    y[threadIdx.x] = s[threadIdx.x] + 1;
}

static __global__ void shared_kernel(float *y) {
    STX__SHARED(float, s, 8 << 10);
    s[0] = 1;
    y[0] = s[0];
}

static __global__ void big_shared_kernel(float *y) {
    STX__SHARED(float, s, (12 << 10) + 4);
    s[0] = 1;
    y[0] = s[0];
}

static __global__ void dynamic_kernel(float *y, int n) {
    STX__DYNAMIC(d);
    d[n - 1] = 1;
    y[0] = d[n - 1];
}

static __global__ void device_write_kernel(float *y, ptrdiff_t at) {
    y[at] = 1;
}

static __global__ void device_read_kernel(float *y, ptrdiff_t at) {
    y[0] = y[at];
}

static __global__ void deep_kernel(float *y) {
    volatile char big[70000];
    for (int i = 69999; i >= 0; i--) big[i] = 1;
    y[0] = big[0];
}

/* y is the device array of 64 floats that the kernels use. */
static void test_divergence(float *y) {
    static const struct {
        const char *name, *word;
    } cases[] = {{"half of the block exits before a barrier", "divergence"},
                 {"two warps at different barriers", "divergence"},
                 {"one warp at a barrier", "divergence"},
                 {"half of a warp shuffles", "never arrive"},
                 {"one lane misses __syncwarp", "never arrive"},
                 {"lanes outside of their mask", "does not contain"},
                 {"odd lanes at a block barrier, even ones at a warp barrier", ""},
                 {"one shuffle at two places", "different places"},
                 {"odd lanes synchronise, even ones shuffle", "never arrive"},
                 {"a shuffle of width 12", "width"}};
    for (int how = 0; how < 10; how++)
        for (int t = 0; t < CUDA_HOST_ORDERS; t++) {
            cuda_host_order(t, 0, 1);
            is_reported(cases[how].name, cases[how].word,
                        [&] { STX__LAUNCH(diverge_kernel, 2, 64, 0, 0, y, how); });
        }
    cuda_host_order(0, 0, 0);
}

static void test_fragments(void) {
    static const struct {
        const char *name, *word;
    } cases[] = {{"ldmatrix of an unaligned row", "aligned"},
                 {"ldmatrix outside of shared memory", "shared memory"},
                 {"mma in half a warp", "the warp has only"},
                 {"cp.async to an unaligned address", "aligned"},
                 {"cp.async from shared memory", "device memory"},
                 {"cp.async to local memory", "shared memory"},
                 {"cp.async of 12 bytes", "size 12"},
                 {"__trap", "__trap"},
                 {"mma with different numbers of products", "never arrive"},
                 {"mma with 9 products", "got 9"}};
    for (int how = 0; how < 10; how++)
        is_reported(cases[how].name, cases[how].word,
                    [&] { STX__LAUNCH(fragment_kernel, 1, how == 2 ? 48 : 32, 0, 0, how); });
}

static void test_uninitialised(float *y) {
    if (cuda_host_launches() > 0) { /* launches must work after an abandoned block */
        STX__LAUNCH(uninitialised_kernel, 1, 32, 0, 0, y);
        CHECK(cudaGetLastError() == cudaSuccess && host_copy(y, 32)[3] != host_copy(y, 32)[3],
              "uninitialised shared memory is NaN");
    }
    cuda_host_fill(CUDA_HOST_FILL_RANDOM);
    STX__LAUNCH(uninitialised_kernel, 1, 32, 0, 0, y);
    std::vector<float> first = host_copy(y, 32);
    STX__LAUNCH(uninitialised_kernel, 1, 32, 0, 0, y);
    CHECK(memcmp(first.data(), host_copy(y, 32).data(), 128),
          "uninitialised shared memory differs between runs");
    cuda_host_fill(CUDA_HOST_FILL_NAN);
}

#ifdef ASAN
static void test_overruns(float *y) {
    kills("shared write past the end",
          [&] { STX__LAUNCH(overrun_kernel, 1, 1, 0, 0, y, 10, 0, 0); });
    kills("shared read past the end",
          [&] { STX__LAUNCH(overrun_kernel, 1, 1, 0, 0, y, 10, 1, 0); });
    kills("dynamic shared read past the end",
          [&] { STX__LAUNCH(overrun_kernel, 1, 1, 20, 0, y, 5, 1, 1); });
    kills("device write past the end",
          [&] { STX__LAUNCH(device_write_kernel, 1, 1, 0, 0, y, 64); });
    kills("device read past the end", [&] { STX__LAUNCH(device_read_kernel, 1, 1, 0, 0, y, 64); });
    kills("device read below the start",
          [&] { STX__LAUNCH(device_read_kernel, 1, 1, 0, 0, y, -1); });
    kills("use after cudaFree", [&] {
        float *p;
        cudaMalloc(&p, 64);
        cudaFree(p);
        STX__LAUNCH(device_read_kernel, 1, 1, 0, 0, p, 0);
    });
}
#else
static void test_overruns(float *y) {
    is_reported("shared write past the end", "past its end",
                [&] { STX__LAUNCH(overrun_kernel, 1, 1, 0, 0, y, 10, 0, 0); });
    is_reported("shared write further past the end", "past its end",
                [&] { STX__LAUNCH(overrun_kernel, 1, 1, 0, 0, y, 11, 0, 0); });
    is_reported("shared write below the start",
                "memory: ", [&] { STX__LAUNCH(overrun_kernel, 1, 1, 0, 0, y, -1, 0, 1); });
    is_reported("dynamic shared write past the end", "dynamic",
                [&] { STX__LAUNCH(overrun_kernel, 1, 1, 20, 0, y, 5, 0, 1); });
    is_reported("device write past the end", "past its end",
                [&] { STX__LAUNCH(device_write_kernel, 1, 1, 0, 0, y, 64); });
    is_reported("device write below the start", "below its start",
                [&] { STX__LAUNCH(device_write_kernel, 1, 1, 0, 0, y, -1); });
    STX__LAUNCH(device_read_kernel, 1, 1, 0, 0, y, 64);
    CHECK(host_copy(y, 1)[0] != host_copy(y, 1)[0], "memory past an allocation reads as NaN");
    kills("a device address far away",
          [&] { STX__LAUNCH(device_read_kernel, 1, 1, 0, 0, y, (ptrdiff_t)1 << 28); });
}
#endif

static void test_launch_limits(float *y) {
    STX__LAUNCH(shared_kernel, 1, 1, 16 << 10, 0, y);
    CHECK(cudaGetLastError() == cudaSuccess && cuda_host_reports() == 0,
          "32 + 16 KB of shared memory");
    is_reported("32 + 16 KB and a byte", "too much", [&] {
        STX__LAUNCH(shared_kernel, 1, 1, (16 << 10) + 1, 0, y);
        CHECK(cudaGetLastError() == cudaErrorInvalidValue, "32 + 16 KB and a byte");
    });
    is_reported("more than 48 KB of static shared memory", "static", [&] {
        STX__LAUNCH(big_shared_kernel, 1, 1, 0, 0, y);
        CHECK(cudaGetLastError() == cudaErrorInvalidValue, "more than 48 KB");
    });
    STX__LAUNCH(dynamic_kernel, 1, 1, 49153, 0, y, 49153);
    CHECK(cudaGetLastError() == cudaErrorInvalidValue, "48 KB of dynamic memory and a byte");
    FAILS(cudaFuncSetAttribute(dynamic_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 232449),
          cudaErrorInvalidValue);
    OK(cudaFuncSetAttribute(dynamic_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 232448));
    STX__LAUNCH(dynamic_kernel, 1, 1, 232448, 0, y, 232448);
    CHECK(cudaGetLastError() == cudaSuccess, "227 KB of dynamic memory");
    STX__LAUNCH(dynamic_kernel, 1, 1, 232449, 0, y, 100);
    CHECK(cudaGetLastError() == cudaErrorInvalidValue, "227 KB and a byte");

    dim3 grids[] = {dim3(0), dim3(1, 65536), dim3(1, 1, 65536), dim3(1), dim3(1), dim3(1)};
    dim3 blocks[] = {dim3(1), dim3(1), dim3(1), dim3(1025), dim3(1, 0), dim3(1, 1, 65)};
    for (int i = 0; i < 6; i++) {
        STX__LAUNCH(empty_kernel, grids[i], blocks[i], 0, 0);
        CHECK(cudaPeekAtLastError() == cudaErrorInvalidConfiguration
                  && cudaGetLastError() == cudaErrorInvalidConfiguration,
              "invalid configuration %d", i);
    }
    STX__LAUNCH(empty_kernel, 1, 1024, 0, 0);
    CHECK(cudaGetLastError() == cudaSuccess, "1024 threads");
}

/* The launch bounds of kernels, and of pointers to kernels, must be enforced. */
static void test_launch_bounds(void) {
    typedef stx__kernel_of<unsigned *> pointer;
    const pointer all[] = {bound_kernel<32>, bound_kernel<128>, bound_kernel<256>,
                           bound_with_blocks_kernel};
    const int most[] = {32, 128, 256, 256};
    unsigned *n = NULL;
    pointer none = NULL;
    OK(cudaMalloc(&n, 4));
    CHECK(!none && (const void *)all[0] == (const void *)bound_kernel<32>, "pointers to kernels");
    for (int i = 0; i < 4; i++) {
        OK(cudaMemset(n, 0, 4));
        STX__LAUNCH(all[i], 2, most[i], 0, 0, n);
        CHECK(cudaGetLastError() == cudaSuccess && host_copy(n, 1)[0] == 2 * (unsigned)most[i],
              "%d threads", most[i]);
        is_reported("launch bound", "launch bound", [&] {
            STX__LAUNCH(all[i], 1, dim3((unsigned)most[i] / 2, 3), 0, 0, n);
            CHECK(cudaGetLastError() == cudaErrorInvalidValue, "more than %d threads", most[i]);
        });
    }
    is_reported("launch bound", "256 threads per block, the launch bound of the kernel is 128",
                [&] { STX__LAUNCH(bound_kernel<64>, 1, 256, 0, 0, n); });
    STX__LAUNCH(bound_kernel<1024>, 1, 1024, 0, 0, n);
    CHECK(cudaGetLastError() == cudaSuccess, "a bound of 1024");
    OK(cudaFree(n));
}

static void test_host_pointers(float *pinned) {
    float host[64];
    std::vector<float> heap(64), large(1 << 20);
    scale_args args;
    memset(&args, 0, sizeof args);
    args.m = 7;
    args.s = 1e-3; /* a struct of words that are not pointers */
    is_reported("stack", "the host's", [&] { STX__LAUNCH(scale_kernel, 1, 1, 0, 0, args, host); });
    is_reported("heap", "argument 2",
                [&] { STX__LAUNCH(scale_kernel, 1, 1, 0, 0, args, heap.data()); });
    is_reported("a large allocation on the heap", "heap",
                [&] { STX__LAUNCH(scale_kernel, 1, 1, 0, 0, args, large.data()); });
    args.x = heap.data();
    is_reported("a pointer in a struct", "argument 1 holds",
                [&] { STX__LAUNCH(scale_kernel, 1, 1, 0, 0, args, NULL); });
    args.x = pinned;
    STX__LAUNCH(scale_kernel, 1, 1, 0, 0, args, NULL);
    CHECK(cuda_host_reports() == 0, "page-locked memory is legal");
    cuda_host_allow_pinned(0);
    is_reported("page-locked memory", "page-locked",
                [&] { STX__LAUNCH(scale_kernel, 1, 1, 0, 0, args, NULL); });
    cuda_host_allow_pinned(1);
}

static void test_copies(float *y, float *pinned) {
    float host[64];
    std::vector<float> heap(64);
    is_reported("a copy to the device whose destination is the host", "HostToDevice", [&] {
        FAILS(cudaMemcpy(host, y, 16, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
    });
    is_reported("a copy to the host whose destination is the device", "DeviceToHost", [&] {
        FAILS(cudaMemcpy(y, host, 16, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
    });
    is_reported("a copy on the device whose source is the host", "DeviceToDevice", [&] {
        FAILS(cudaMemcpyAsync(y, pinned, 16, cudaMemcpyDeviceToDevice, 0), cudaErrorInvalidValue);
    });
    is_reported("a copy beyond an allocation", "allocation", [&] {
        FAILS(cudaMemcpy(host, y + 60, 20, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
    });
    is_reported("a copy of rows beyond an allocation", "allocation", [&] {
        FAILS(cudaMemcpy2DAsync(y, 32, host, 32, 32, 9, cudaMemcpyHostToDevice, 0),
              cudaErrorInvalidValue);
    });
    OK(cudaMemset(y, 0, 64));
    OK(cudaMemcpyAsync(pinned, y, 64, cudaMemcpyDeviceToHost, 0));
    CHECK(pinned[0] != pinned[0], "a copy is not delivered before the host waits for it");
    OK(cudaStreamSynchronize(0));
    CHECK(pinned[0] == 0 && pinned[15] == 0, "a copy is delivered when the host waits for it");
    is_reported("a call from a host function", "cudaLaunchHostFunc", [&] {
        OK(cudaLaunchHostFunc(
            0, [](void *) { cudaDeviceSynchronize(); }, NULL));
    });
    is_reported("memset of host memory", "device memory",
                [&] { FAILS(cudaMemsetAsync(host, 0, 4, 0), cudaErrorInvalidValue); });
    is_reported("cudaFree", "not an allocation",
                [&] { FAILS(cudaFree(y + 1), cudaErrorInvalidValue); });
    OK(cudaMemcpy(host, y, 16, cudaMemcpyDefault));
    OK(cudaMemcpy2DAsync(y, 16, heap.data(), 32, 8, 4, cudaMemcpyHostToDevice, 0));
}

static void test_violations(void) {
    float *y, *pinned;
    OK(cudaMalloc(&y, 256));
    OK(cudaMallocHost(&pinned, 256));
    test_divergence(y);
    test_fragments();
    test_uninitialised(y);
    test_overruns(y);
    kills("stack overflow", [&] { STX__LAUNCH(deep_kernel, 1, 1, 0, 0, y); });
    kills("the host reads device memory", [&] { printf("%g\n", (double)*(volatile float *)y); });
    kills("the host writes device memory", [&] { *(volatile float *)y = 1; });
    test_launch_limits(y);
    test_launch_bounds();
    test_host_pointers(pinned);
    test_copies(y, pinned);
    OK(cudaFree(y));
    OK(cudaFreeHost(pinned));
}

// --------------------------------------------------------------------------------------
// runtime API

static void test_properties(void) {
    int n = 0, v = 0;
    cudaDeviceProp prop;
    OK(cudaGetDeviceCount(&n));
    CHECK(n == 1, "%d devices, expected 1", n);
    cuda_host_arch(8, 6);
    OK(cudaGetDeviceProperties(&prop, 0));
    OK(cudaDeviceGetAttribute(&v, cudaDevAttrComputeCapabilityMinor, 0));
    CHECK(prop.major == 8 && v == 6 && prop.sharedMemPerBlockOptin == 232448, "properties");
    cuda_host_arch(9, 0);
    CHECK(prop.multiProcessorCount == 4, "%d multiprocessors, expected 4",
          prop.multiProcessorCount);
    cuda_host_sms(132);
    OK(cudaGetDeviceProperties(&prop, 0));
    OK(cudaDeviceGetAttribute(&v, cudaDevAttrMultiProcessorCount, 0));
    CHECK(prop.multiProcessorCount == 132 && v == 132, "%d multiprocessors, expected 132", v);
    cuda_host_sms(4);
    FAILS(cudaGetDeviceProperties(&prop, 1), cudaErrorInvalidDevice);
}

/* Tests allocations, and returns one of them. */
static float *test_allocation(size_t before) {
    float *p, *q;
    size_t unused, total;
    cuda_host_fail_alloc(2);
    OK(cudaMalloc(&p, 1000));
    FAILS(cudaMalloc(&q, 1000), cudaErrorMemoryAllocation);
    OK(cudaMalloc(&q, 1000));
    CHECK(cuda_host_bytes_in_use() == before + 2000 && (uintptr_t)q % 256 == 0
              && cuda_host_is_device(q),
          "allocations");
    CHECK(host_copy(q, 1)[0] != host_copy(q, 1)[0], "new device memory is NaN");
    cuda_host_memory(1 << 20);
    OK(cudaMemGetInfo(&unused, &total));
    CHECK(total == 1 << 20 && unused == total - cuda_host_bytes_in_use(), "free memory");
    OK(cudaFree(q));
    FAILS(cudaMalloc(&q, 1 << 20), cudaErrorMemoryAllocation);
    cuda_host_memory((size_t)8 << 30);
    return p;
}

static unsigned *test_atomics(void) {
    unsigned *count;
    OK(cudaMalloc(&count, 8));
    OK(cudaMemset(count, 0, 8));
    STX__LAUNCH(count_kernel, dim3(7, 3), dim3(9, 5), 0, 0, count);
    CHECK(host_copy(count, 2)[0] == 7 * 3 * 9 * 5 && host_copy(count, 2)[1] == 6, "atomics");
    return count;
}

static void test_occupancy(void) {
    int n = 0;
    cudaFuncAttributes attr;
    OK(cudaFuncGetAttributes(&attr, sum_kernel));
    CHECK(attr.sharedSizeBytes == 32 && attr.maxThreadsPerBlock == 1024, "attributes");
    OK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n, sum_kernel, 256, 0));
    CHECK(n == 1, "%d blocks with 255 registers, expected 1", n);
    cuda_host_registers(32);
    OK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n, sum_kernel, 256, 0));
    CHECK(n == 8, "%d blocks with 32 registers, expected 8", n);
    OK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n, sum_kernel, 256, 100 << 10));
    CHECK(n == 2, "%d blocks with 100 KB of shared memory, expected 2", n);
    cuda_host_registers(255);
}

static void test_sticky_errors(void) {
    float *q;
    long launches = cuda_host_launches();
    cuda_host_fail_launch(2);
    STX__LAUNCH(empty_kernel, 1, 1, 0, 0);
    CHECK(cudaGetLastError() == cudaSuccess, "the first launch");
    STX__LAUNCH(empty_kernel, 1, 1, 0, 0);
    CHECK(cudaGetLastError() == cudaErrorLaunchFailure
              && cudaGetLastError() == cudaErrorLaunchFailure,
          "reading the last error does not clear a sticky one");
    CHECK(cudaDeviceSynchronize() == cudaErrorLaunchFailure
              && cudaMalloc(&q, 4) == cudaErrorLaunchFailure,
          "all calls return a sticky error");
    CHECK(cuda_host_launches() == launches + 2, "failed launches are counted");
    cuda_host_reset_errors();
    CHECK(cudaGetLastError() == cudaSuccess, "cuda_host_reset_errors");
}

static void test_failing_captures(void) {
    cudaStream_t s;
    cudaGraph_t g;
    cudaGraphExec_t x;
    OK(cudaStreamCreate(&s));
    cuda_host_fail_graph(CUDA_HOST_BEGIN_CAPTURE, 1);
    FAILS(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal),
          cudaErrorStreamCaptureUnsupported);
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    cuda_host_fail_graph(CUDA_HOST_END_CAPTURE, 1);
    FAILS(cudaStreamEndCapture(s, &g), cudaErrorStreamCaptureInvalidated);
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    OK(cudaStreamEndCapture(s, &g));
    cuda_host_fail_graph(CUDA_HOST_INSTANTIATE, 2);
    OK(cudaGraphInstantiate(&x, g, 0));
    OK(cudaGraphExecDestroy(x));
    FAILS(cudaGraphInstantiate(&x, g, 0), cudaErrorMemoryAllocation);
    OK(cudaGraphDestroy(g));
    OK(cudaStreamDestroy(s));
}

/* Streams, events, memory and kernel limits must be separate for each GPU. */
static void test_two_gpus(void) {
    cudaStream_t s[2];
    cudaEvent_t e;
    unsigned *own[2];
    long reports = cuda_host_reports();
    cuda_host_devices(2);
    for (int n = 0; n < 2; n++) {
        OK(cudaSetDevice(n));
        OK(cudaStreamCreate(s + n));
        OK(cudaMalloc(own + n, 8));
        OK(cudaMemset(own[n], 0, 8));
    }
    STX__LAUNCH(count_kernel, 1, 32, 0, s[1], own[1]);
    CHECK(cudaGetLastError() == cudaSuccess && cuda_host_reports() == reports,
          "a kernel on GPU 1");
    STX__LAUNCH(count_kernel, 1, 32, 0, s[0], own[1]);
    CHECK(cudaGetLastError() == cudaErrorInvalidResourceHandle, "a stream of another GPU");
    cuda_host_clear_reports();
    cuda_host_quiet(1);
    STX__LAUNCH(count_kernel, 1, 32, 0, s[1], own[0]);
    CHECK(cuda_host_reports() == 1 && strstr(cuda_host_last_report(), "memory of GPU 0"),
          "memory of another GPU: %s", cuda_host_last_report());
    cuda_host_clear_reports();
    cuda_host_quiet(0);
    OK(cudaEventCreate(&e));
    OK(cudaEventRecord(e, s[1]));
    FAILS(cudaEventRecord(e, s[0]), cudaErrorInvalidResourceHandle);
    OK(cudaFuncSetAttribute(empty_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 60000));
    STX__LAUNCH(empty_kernel, 1, 1, 60000, s[1]);
    CHECK(cudaGetLastError() == cudaSuccess, "a limit set on GPU 1");
    OK(cudaSetDevice(0));
    STX__LAUNCH(empty_kernel, 1, 1, 60000, s[0]);
    CHECK(cudaGetLastError() == cudaErrorInvalidValue, "a limit set on another GPU");
    OK(cudaEventDestroy(e));
    for (int n = 0; n < 2; n++) {
        OK(cudaFree(own[n]));
        OK(cudaStreamDestroy(s[n]));
    }
    cuda_host_devices(1);
    CHECK(reports == 0, "%ld reports before", reports);
}

static void test_no_gpu(void) {
    int n;
    float *q;
    cuda_host_devices(0);
    FAILS(cudaGetDeviceCount(&n), cudaErrorNoDevice);
    FAILS(cudaMalloc(&q, 4), cudaErrorNoDevice);
    cuda_host_devices(1);
}

static void test_arithmetic(void) {
    CHECK(__bfloat16_as_ushort(__float2bfloat16(1.00390625f)) == 0x3f80
              && __bfloat16_as_ushort(__float2bfloat16(1.01171875f)) == 0x3f82,
          "bf16: ties to even");
    CHECK(__bfloat16_as_ushort(__float2bfloat16_rn(nanf(""))) == 0x7fff
              && isinf(__bfloat162float(__float2bfloat16(3.4e38f))),
          "bf16: NaN and overflow");
    __nv_bfloat162 two = __floats2bfloat162_rn(1, -2);
    CHECK(__low2float(two) == 1 && __high2float(two) == -2 && __bfloat1622float2(two).y == -2,
          "bf16: pairs");
    CHECK(__umulhi(0xffffffffu, 0xffffffffu) == 0xfffffffeu && __umul64hi(~0ull, ~0ull) == ~0ull - 1
              && __clz(1) == 31 && __ffs(8) == 4,
          "integers");
}

static void test_runtime(void) {
    size_t before = cuda_host_bytes_in_use();
    long syncs = cuda_host_syncs();
    test_properties();
    float *p = test_allocation(before);
    OK(cudaDeviceSynchronize());
    CHECK(cuda_host_syncs() == syncs + 3, "%ld waits, expected 3", cuda_host_syncs() - syncs);
    unsigned *count = test_atomics();
    test_occupancy();
    test_sticky_errors();
    test_failing_captures();
    test_two_gpus();
    test_no_gpu();
    OK(cudaFree(p));
    OK(cudaFree(count));
    CHECK(cuda_host_bytes_in_use() == before && cuda_host_pinned_in_use() == 0,
          "all memory is freed");
    test_arithmetic();
}

// exchanges in a group of one rank: when they run, in streams and in graphs, and which
// uses are forbidden. Groups of several ranks are tested in test_cuda_group.c.

/* Queries the state of c until the last call is no longer in progress, and returns the
   state. */
static ncclResult_t state_of(ncclComm_t c) {
    ncclResult_t r = ncclInProgress;
    for (int i = 0; i < 5 && r == ncclInProgress; i++) ncclCommGetAsyncError(c, &r);
    return r;
}

static ncclComm_t group_of_one(void) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId id;
    ncclComm_t c = NULL;
    config.blocking = 0;
    CHECK(ncclGetUniqueId(&id) == ncclSuccess
              && ncclCommInitRankConfig(&c, 1, id, 0, &config) == ncclInProgress
              && state_of(c) == ncclSuccess,
          "a group of one");
    return c;
}

static bool all_equal(const float *p, float v) {
    return host_copy(p, 64) == std::vector<float>(64, v);
}

/* A communicator, two streams, an event and two arrays of 64 floats. */
struct nccl_setup {
    ncclComm_t c;
    cudaStream_t s, s2;
    cudaEvent_t e;
    float *a, *b;
};

static void test_deferred_exchanges(const nccl_setup &t) {
    float *a = t.a, *b = t.b;
    ncclComm_t c = t.c;
    long done = cuda_host_exchanges();
    CHECK(ncclAllReduce(a, b, 64, ncclFloat, ncclSum, c, t.s2) == ncclInProgress
              && state_of(c) == ncclSuccess,
          "ncclAllReduce");
    OK(cudaMemsetAsync(a, 0, 256, t.s));
    CHECK(all_equal(b, 0) && cuda_host_exchanges() == done,
          "an exchange does not run before the host or a stream waits for it");
    OK(cudaStreamQuery(t.s2));
    CHECK(all_equal(b, 0) && all_equal(a, 0) && cuda_host_exchanges() == done + 1,
          "an exchange uses the data at the time at which it runs");
    OK(cudaMemcpy(a, std::vector<float>(64, 4.0f).data(), 256, cudaMemcpyHostToDevice));
    CHECK(ncclReduce(a, b, 64, ncclFloat, ncclAvg, 0, c, t.s2) == ncclInProgress
              && state_of(c) == ncclSuccess,
          "ncclReduce");
    OK(cudaEventRecord(t.e, t.s2));
    OK(cudaMemsetAsync(b, 0, 256, t.s));
    OK(cudaStreamWaitEvent(t.s, t.e, 0));
    CHECK(all_equal(a, 4) && all_equal(b, 0),
          "a stream that waits for the exchange, but has no work, does not run it");
    OK(cudaMemcpyAsync(a, b, 256, cudaMemcpyDeviceToDevice, t.s));
    CHECK(all_equal(a, 4) && all_equal(b, 4) && cuda_host_exchanges() == done + 2,
          "work of a stream that waits for the exchange runs it");
    OK(cudaEventQuery(t.e));
    CHECK(ncclBroadcast(a, b, 64, ncclUint8, 0, c, t.s2) == ncclInProgress, "ncclBroadcast");
    OK(cudaStreamSynchronize(t.s2));
    CHECK(cuda_host_exchanges() == done + 2 && state_of(c) == ncclSuccess,
          "an exchange is not in its stream before its state was queried");
    OK(cudaStreamSynchronize(t.s2));
    CHECK(cuda_host_exchanges() == done + 3, "an exchange runs after its state was queried");
}

/* Tests a captured exchange, and returns the executable graph that contains it. */
static cudaGraphExec_t test_captured_exchange(const nccl_setup &t) {
    cudaGraph_t g;
    cudaGraphExec_t x;
    long done = cuda_host_exchanges();
    OK(cudaStreamBeginCapture(t.s, cudaStreamCaptureModeThreadLocal));
    CHECK(ncclAllReduce(t.a, t.b, 64, ncclFloat, ncclMax, t.c, t.s) == ncclInProgress
              && state_of(t.c) == ncclSuccess,
          "a captured exchange");
    OK(cudaMemcpyAsync(t.a, t.b, 128, cudaMemcpyDeviceToDevice, t.s));
    OK(cudaStreamEndCapture(t.s, &g));
    OK(cudaGraphInstantiate(&x, g, 0));
    OK(cudaGraphDestroy(g));
    for (int i = 0; i < 3; i++) {
        std::vector<float> now(64, 5.0f + (float)i);
        OK(cudaMemcpy(t.a, now.data(), 256, cudaMemcpyHostToDevice));
        OK(cudaGraphLaunch(x, t.s));
        OK(cudaStreamSynchronize(t.s));
        CHECK(all_equal(t.b, 5.0f + (float)i) && cuda_host_exchanges() == done + 1 + i, "replay %d",
              i);
    }
    return x;
}

static void test_invalid_exchanges(const nccl_setup &t) {
    is_reported("an exchange during another call", "in progress", [&] {
        CHECK(ncclAllReduce(t.a, t.b, 64, ncclFloat, ncclSum, t.c, t.s) == ncclInProgress,
              "the first exchange");
        CHECK(ncclAllReduce(t.a, t.b, 64, ncclFloat, ncclSum, t.c, t.s) == ncclInvalidUsage,
              "a second exchange while the first call is in progress");
    });
    CHECK(state_of(t.c) == ncclSuccess, "the first exchange remains valid");
    is_reported("an exchange beyond an allocation", "device memory", [&] {
        CHECK(ncclAllReduce(t.a, t.b, 65, ncclFloat, ncclSum, t.c, t.s) == ncclInvalidArgument,
              "an exchange beyond an allocation");
    });
    OK(cudaStreamSynchronize(t.s));
    cuda_host_nccl_fail(ncclRemoteError);
    CHECK(state_of(t.c) == ncclRemoteError, "cuda_host_nccl_fail");
}

static void test_nccl(void) {
    nccl_setup t;
    t.a = device_copy(std::vector<float>(64, 3.0f));
    t.b = device_copy(std::vector<float>(64, 0.0f));
    t.c = group_of_one();
    OK(cudaStreamCreateWithFlags(&t.s, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&t.s2, cudaStreamNonBlocking));
    OK(cudaEventCreateWithFlags(&t.e, cudaEventDisableTiming));
    test_deferred_exchanges(t);
    cudaGraphExec_t x = test_captured_exchange(t);
    test_invalid_exchanges(t);
    is_reported("abort while a graph contains an exchange", "graphs",
                [&] { CHECK(ncclCommAbort(t.c) == ncclSuccess, "ncclCommAbort"); });
    is_reported("a second abort", "does not exist",
                [&] { CHECK(ncclCommAbort(t.c) == ncclInvalidArgument, "a second abort"); });
    OK(cudaGraphExecDestroy(x));
    t.c = group_of_one();
    is_reported("ncclCommDestroy before ncclCommFinalize", "ncclCommFinalize",
                [&] { CHECK(ncclCommDestroy(t.c) == ncclInvalidUsage, "ncclCommDestroy"); });
    CHECK(ncclCommFinalize(t.c) == ncclInProgress && state_of(t.c) == ncclSuccess
              && ncclCommDestroy(t.c) == ncclSuccess && cuda_host_comms() == 0,
          "ncclCommFinalize, then ncclCommDestroy");
    OK(cudaEventDestroy(t.e));
    OK(cudaStreamDestroy(t.s));
    OK(cudaStreamDestroy(t.s2));
    OK(cudaFree(t.a));
    OK(cudaFree(t.b));
}

// --------------------------------------------------------------------------------------
// speed

static __global__ void speed_kernel(float *y, int rounds) {
    float c[4] = {0, 0, 0, 0};
    uint32_t a[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u},
             b[2] = {0x3f803f80u, 0x3f803f80u};
    for (int i = 0; i < rounds; i++) cuda_host_mma_bf16(c, a, b);
    y[threadIdx.x] = c[0];
}

static __global__ void warp_speed_kernel(int rounds) {
    for (int i = 0; i < rounds; i++) __syncwarp();
}

static double seconds(void) {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void print_speed(void) {
    float *y;
    cudaMalloc(&y, 1024);
    double t0 = seconds();
    STX__LAUNCH(speed_kernel, 1, 128, 0, 0, y, 5000);
    double t1 = seconds();
    STX__LAUNCH(warp_speed_kernel, 1, 128, 0, 0, 5000);
    double t2 = seconds();
    for (int i = 0; i < 2000; i++) STX__LAUNCH(empty_kernel, 1, 32, 0, 0);
    double t3 = seconds();
    STX__LAUNCH(empty_kernel, 2000, 256, 0, 0);
    double t4 = seconds();
    printf("mma %.0f ns, switch %.1f ns, launch of 32 threads %.1f us, "
           "block of 256 threads %.1f us\n",
           (t1 - t0) / 20000 * 1e9, (t2 - t1) / (128 * 5000) * 1e9, (t3 - t2) / 2000 * 1e6,
           (t4 - t3) / 2000 * 1e6);
    cudaFree(y);
}

int main(int argc, char **argv) {
    test_sum();
    test_scan();
    test_transpose();
    test_mma();
    test_ldmatrix();
    test_async();
    test_graph();
    test_cublaslt();
    test_violations();
    test_runtime();
    test_nccl();
    if (argc > 1 && !strcmp(argv[1], "speed")) print_speed();
    return test_end();
}
