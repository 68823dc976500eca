#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/ops.h"
#include "../api/train.h"
#include "loops.h"


// >>context

/* Under AddressSanitizer, every allocation from an arena is surrounded by poisoned bytes,
   so overruns are detected even though the arena itself is one block. */
#if defined(__SANITIZE_ADDRESS__)
  #define STX__ASAN 1
#elif defined(__has_feature)
  #if __has_feature(address_sanitizer)
    #define STX__ASAN 1
  #endif
#endif
#ifdef STX__ASAN
  #ifdef __cplusplus
extern "C" {
  #endif
void __asan_poison_memory_region(void const volatile *addr, size_t size);
void __asan_unpoison_memory_region(void const volatile *addr, size_t size);
  #ifdef __cplusplus
}
  #endif
  #define STX__POISON(p, n)   __asan_poison_memory_region(p, n)
  #define STX__UNPOISON(p, n) __asan_unpoison_memory_region(p, n)
  #define STX__RED_ZONE       64
#else
  #define STX__POISON(p, n)   ((void)(p), (void)(n))
  #define STX__UNPOISON(p, n) ((void)(p), (void)(n))
  #define STX__RED_ZONE       0
#endif

/* Device memory cannot be poisoned, unless the host emulates the GPU
   (tests/cuda_host). */
#ifndef STX__DEVICE_SHADOW
  #define STX__DEVICE_SHADOW 0
#endif

/* An upper bound on the bytes that headers, red zones and alignment add to an allocation.
   Sizes above SIZE_MAX - STX__OVERHEAD are rejected, because they could overflow. */
enum { STX__OVERHEAD = 4096 };

/* A chunk of an arena. This struct is in host memory even if the chunk is on a GPU. */
typedef struct stx__chunk {
    struct stx__chunk *next;
    size_t size, used;
    char *base; /* `size` bytes, aligned to 64 bytes */
} stx__chunk;

enum { STX__HOST = -1 };

typedef struct stx__arena {
    const char *name; /* for error texts */
    int kind;         /* STX__HOST, or for GPU memory one of STX_MEM_* */
    stx__chunk *first, *cur;
    size_t used, reserved;
} stx__arena;

static int stx__guarded(const stx__arena *a) {
    return a->kind == STX__HOST || STX__DEVICE_SHADOW;
}

/* The header of a block (stx_block) is in the cache line before the block's aligned
   data. */
enum { STX__BLOCK_HEAD = 64 };

typedef struct stx__block_head {
    struct stx__block_head *prev, *next;
    void *raw;
    size_t size;
} stx__block_head;

enum { STX__INS = 12 }; /* largest number of inputs of any op: attention has the most.
                           Must be at least STX_MAX_INS and STX_MAX_RECOMPUTE_INS */

/* One op on the tape: its outputs, its inputs and its backward function. Most ops have
   the single output y. */
typedef struct stx__node {
    struct stx__node *prev;
    void (*back)(stx_ctx *x, struct stx__node *n);
    stx_tensor *y, *more[STX_MAX_MORE], *in[STX__INS];
    void *save; /* values that the backward function needs */
} stx__node;

/* A gradient buffer that the backward pass no longer needs, or an unused entry of the
   list of such buffers. A buffer is reused only for a gradient of equal size and equal
   f32_among_bf16. On a GPU, bf16 and f32 have separate arenas, and the type of a buffer
   is inferred from its address. */
typedef struct stx__free_grad {
    struct stx__free_grad *next;
    void *p;
    size_t bytes;
    int f32_among_bf16; /* 1: the buffer is f32, although activations are stored as bf16 */
} stx__free_grad;

/* The values that the host reads between steps: metrics, results of optimiser updates,
   and elements of mirrored parameters. They are stored in one device buffer, and the
   host has a copy. */
enum { STX__MIRRORS = 512, STX__MIRROR_VALUES = 8192 };

typedef struct stx__report {
    double metric[STX_MAX_METRICS];
    stx_update update[STX_MAX_OPTIMS];
    stx_real mirror[STX__MIRROR_VALUES];
} stx__report;

/* State of the host's copy of the report. */
enum { STX__STALE, STX__PENDING, STX__CURRENT };

/* A step that was captured as a CUDA graph. */
typedef struct stx__replay {
    uint64_t key;
    uint64_t step, steps; /* step: step index before the step; steps: increase of the
                             index during the step */
    uint64_t used;        /* value of replay.runs when this step last ran; 0 if the entry
                             is unused */
    void *graph;          /* NULL if the capture failed */
    char error[128];      /* why the capture failed, if graph is NULL */
} stx__replay;

enum { STX__REPLAYS = 8 };

/* Scratch memory of one thread, in elements: packed blocks of the GEMM operands A (MC KC)
   and B (KC NC). Blocks may have other shapes; see stx__block_k and stx__block_n. */
enum {
    STX__KC = 512,
    STX__MC = 112,
    STX__NC = 768,
    STX__SCRATCH = STX__MC * STX__KC + STX__KC * STX__NC
};

/* Exchanges between ranks. Each back end of >>group has one such table of functions. */
typedef struct stx__group_ops {
    /* Exchange host memory. Return 1 when complete, or set an error and return 0. */
    int (*reduce)(stx_ctx *x, double *v, size_t n, int max);    /* max = 1: maximum over
                                                                   the ranks; 0: sum */
    int (*broadcast)(stx_ctx *x, void *bytes, size_t n, int from);
    int (*send)(stx_ctx *x, void *bytes, size_t n, int from, int to);

    /* Exchange device memory. start_mean and spread start an exchange; exchanges are
       executed in the order of the calls, and wait completes all of them. After
       start_mean, p is the mean over the ranks, in all ranks or, if owner >= 0, only in
       rank `owner`; p is then undefined in the others. spread copies the owner's values
       to all ranks. */
    void (*start_mean)(stx_ctx *x, stx_real *p, size_t n, int owner);
    void (*spread)(stx_ctx *x, stx_real *p, size_t n, int owner);
    void (*wait)(stx_ctx *x, stx_real *means, size_t n);  /* means (n): results of
                                                             start_mean since the last
                                                             wait; n is 0 if none */
    void (*sum_ranks)(stx_ctx *x, double *v, size_t n);
    void (*poll)(stx_ctx *x);   /* advances the started exchanges; NULL if not needed */

    /* Gradients can be sent while stx_backward computes them. backward_begin is called
       before the first node and returns the number of nodes on the tape; backward_step is
       called before each node, with the number of nodes still to run, and at the end with
       0. */
    size_t (*backward_begin)(stx_ctx *x);
    void (*backward_step)(stx_ctx *x, size_t left);

    void (*leave)(stx_ctx *x);
    void (*abort)(stx_ctx *x, int code);
    void (*forget)(stx_ctx *x); /* called if stx_destroy runs before leave; may be NULL */
} stx__group_ops;

/* Packed weights: the rounded copy that stx_params_pack makes of a matrix. */
typedef struct stx__packed {
    const stx_real *from;  /* the parameter's data, (size / C, C) */
    size_t size, C, bytes; /* size: elements; C: columns; bytes: size of the packed values */
    const uint16_t *h;     /* STX_WEIGHTS_BF16: (size / C, C); STX_WEIGHTS_INT8: NULL */
    const int8_t *q;       /* STX_WEIGHTS_INT8: (size / C, C); weight = f q */
    const float *f;        /* STX_WEIGHTS_INT8: scales (size / C, C / 32 rounded up); one
                              scale per 32 columns */
    /* C = alpha A op(B) + beta C for up to STX__GEMV_ROWS rows of A. B begins at
       element `at` of the packed matrix. */
    void (*gemv)(stx_ctx *x, const stx_gemm_args *g, const struct stx__packed *w, size_t at);
} stx__packed;

/* The sub-structs of a context belong to these sections: error and mem in >>context, tape
   in >>tape and >>recomputation, rng in >>random, threads in >>threads, packed in >>gemm:
   packed weights, report in >>report, replay in >>steps, group in >>group. */
struct stx_ctx {
    stx_desc desc;
    int isa; /* STX__ISA_*: instruction set of the inner loops */
    const struct stx__micro *micro;
    void *gpu;                   /* the context's stx_gpu; NULL on a CPU */
    struct stx__scalar *scalars; /* linked list, newest first */
    stx_params *lists;           /* linked list, newest first */
    uint64_t params_made;        /* parameters created so far, in all lists */
    stx_ids *zero_id;            /* (1,1), contains 0 */

    struct {
        int code; /* STX_OK or STX_ERR_* */
        char text[512];
    } error;

    struct {
        stx__arena keep, step;
        /* arenas in GPU memory: state, parameters, activations of a step, and other
           data of a step */
        stx__arena dev_keep, dev_params, dev_step, dev_bytes;
        struct stx__dev_block *dev_blocks;
        stx__block_head blocks; /* circular list of the blocks that stx_block allocated */
        size_t block_bytes, peak;
        /* buffers to free when the next step begins; until then, the backward pass may
           read them */
        struct stx__freed_at_step_end *freed_at_step_end;
    } mem;

    struct {
        int mode;        /* STX_TRAIN or STX_EVAL */
        int recording;   /* 1: ops add nodes to the tape. 0 in STX_EVAL, and in STX_TRAIN
                            during stx__run_backward, the first run of stx_recompute and
                            stx_adaptive_log_probs */
        stx__node *last; /* the newest node */
        stx__free_grad *free_grads, *free_entries;
        uint64_t steps_begun; /* number of calls to stx_begin, plus 1: never 0, which in
                                 stx_memory_layer.viewed_step means no step */
        /* in the backward pass of stx_recompute: positions in the step arenas before
           the second run; otherwise NULL */
        const struct stx__mark *recompute_mark;
        /* in the first run of stx_recompute: the gradients that the function requires;
           otherwise NULL */
        struct stx__uses *uses;
    } tape;

    struct {
        uint64_t step, op; /* random numbers are keyed by the step index and by the index
                              of the op in the step */
        size_t part; /* of the batch, see stx_begin_part */
    } rng;

    struct {
        stx_real *scratch;      /* STX__SCRATCH elements per thread */
        struct stx__pool *pool; /* NULL if there are no worker threads */
        int automatic;          /* 1: desc.threads was 0 */
    } threads;

    struct {
        stx__packed *matrix; /* (count), sorted by address; the values of each are in a
                                separate block */
        size_t count;
    } packed;

    struct {
        stx__report *device, *host; /* the same memory on a CPU */
        int age;                    /* state of the host's copy: STX__STALE, _PENDING or
                                       _CURRENT */
        int optims;
        int mirrors_stale; /* 1: a parameter may have changed since the last copy */
        size_t mirrors, mirror_values;
        const stx_tensor **mirror;     /* (mirrors), capacity STX__MIRRORS */
        size_t *mirror_offset;         /* (mirrors): offsets in report.mirror */
        stx_optim_chunk *mirror_chunk; /* (mirrors), on the device */
    } report;

    struct {
        stx__replay entry[STX__REPLAYS];
        uint64_t last_key, runs;
        int ran; /* 1: last_key is valid, because a step has run */
        /* on a GPU: description of the first host access or allocation, in this step
           and in the last step that was not captured; NULL if there was none */
        const char *host_access, *last_access;
        char status[256]; /* text of stx_step_replay_status */
    } replay;

    struct {
        const stx__group_ops *ops; /* NULL without a group */
        void *engine;              /* stx__mpi, see >>group */
        int rank, ranks;           /* both 0 without a group */
        size_t bucket;             /* gradient elements per exchange, see stx_group_desc */
        int shard;                 /* stx_group_desc.shard */
        /* the list whose gradients are sent while stx_backward computes them, or NULL */
        stx_params *sending;
        size_t in_flight; /* gradient buckets that were sent but not yet waited for */
    } group;
};

static int stx__find_isa(void) {
#ifdef STX__X86
    if (!STX__VECTORS_SAFE) return STX__ISA_BASE;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return STX__ISA_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return STX__ISA_AVX2;
#endif
    return STX__ISA_BASE;
}

STX_DEF int stx_isa(const stx_ctx *x) {
    return x ? x->isa : stx__find_isa();
}
