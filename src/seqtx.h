/* seqtx.h - v0.2 - the core of a library of long-context sequence models in C99
   no warranty implied; MIT or public domain, your choice (see the end of this file)

   In ONE .c or .cpp file:                everywhere else:
       #define SEQTX_IMPLEMENTATION           #include "seqtx.h"
       #include "seqtx.h"

   Compile with -O2 and link with -lm (and with -pthread if glibc is older than 2.34).
   There are no other dependencies. The GPU is optional, see "GPU" below.

   Contents: tensors and automatic differentiation; fused attention with relative
   positions, windows and learned spans; optimisers; data-parallel training; checkpoints;
   and the parts that language models share: embeddings, output heads, memories, KV
   caches, sampling. All state is in a context. The library never prints, exits or aborts.


   MANUAL

   The models have separate headers, each of which needs only this one:

       seqtx_attn_span.h     Sequential Transformer: adaptive attention span,
                             all-attention
       seqtx_sru.h           SRU and SRU++: simple recurrent units, with or without
                             attention
       seqtx_compressive.h   Compressive Transformer: compresses old memories
       seqtx_par.h           Transformer-XL with its blocks in any order, and PAR, a
                             search for the best order
       seqtx_text.h          text data for all models: vocabularies, corpora, batches

   To use one of these models, start with the manual of its header. This manual is for
   programmers who build a model out of ops or add ops and model families, and for readers
   who want to know how the library works.

   Layers of the code

       model families      seqtx_*.h: parameters, forward pass, memory, generation
       language models     embedding and output head, memory, KV cache, stx_lm
       training            optimisers, steps, groups of processes, files, checkpoints
       ops                 take and return tensors; are recorded on a tape
       kernels             take raw pointers and sizes; each has a CPU and a CUDA version
       context             memory, threads, random numbers, errors

   Kernels are plain functions, forward and backward. Read them to learn the algorithms,
   or call them directly. Ops (stx_linear, stx_attention, ..) check shapes, allocate their
   result, run a kernel and record a backward function on the tape. stx_backward walks the
   tape from the loss back to the parameters and computes their gradients. A model is a
   chain of ops that reads like the paper. One training step is

       stx_begin(x, STX_TRAIN);                  free old tensors, clear the tape
       stx_tensor *loss = .. ops ..;             forward pass, recorded on the tape
       stx_backward(x, loss);                    compute the gradients of all parameters
       stx_optim_step(optim, lr);                update, then zero the gradients
       if (!stx_ok(x)) puts(stx_error(x));       one check per step is enough

   Quick start. This program fits y = tanh(W x) by gradient descent. A test compiles and
   runs it.

   //>quickstart
       #define SEQTX_IMPLEMENTATION
       #include "seqtx.h"
       #include <stdio.h>

       int main(void) {
           stx_ctx *x = stx_create(NULL);
           stx_params *params = stx_params_create(x);
           stx_tensor *W = stx_param(params, STX_NORMAL, 0.5, "w", 2, 3, 0, 0);
           stx_optim_desc desc = {0};
           desc.kind = STX_SGD;
           stx_optim *optim = stx_optim_create(params, &desc);

           stx_real in[6] = {1, 0, 0, 0, 1, 1};                  // (2,3)
           stx_real target[4] = {0.5f, -0.5f, 0.25f, 0.75f};     // (2,2)
           for (int step = 0; step < 50 && stx_ok(x); step++) {
               stx_begin(x, STX_TRAIN);
               stx_tensor *a = stx_input(x, in, 2, 3, 0, 0);
               stx_tensor *b = stx_input(x, target, 2, 2, 0, 0);
               stx_tensor *y = stx_linear(x, a, W, NULL, STX_ACT_TANH);
               stx_tensor *loss = stx_mse(x, y, b);
               stx_backward(x, loss);
               if (step % 10 == 0) printf("step %d loss %.5f\n", step, stx_item(x, loss));
               stx_optim_step(optim, 0.2);
           }
           int failed = !stx_ok(x);
           if (failed) printf("error: %s\n", stx_error(x));
           stx_destroy(x);
           return failed;
       }
   //<quickstart

   Tensors are dense and row-major, with 1 to 4 dimensions. Comments give shapes in
   parentheses, as in (B,T,C); the table of letters is at the beginning of the API.
   Elements have the type stx_real. dx is the gradient of x.

   Memory and lifetimes. The context owns all memory, and stx_destroy frees it.

       object                                            valid until
       ------------------------------------------------  --------------------------------
       results of ops, stx_input, stx_tokens, the tape   the next stx_begin
       parameters, optimisers, models, results of        stx_destroy
           stx_constant_create, stx_scalar_create and
           stx_tokens_create
       memories, caches, model states, generators        freed by their .._free function,
                                                         or stx_destroy
       stx_file, stx_map, stx_writer                     closed or finished by the caller,
                                                         before stx_destroy

   Tensors of a step come from the step arena, which stx_begin rewinds. If all steps have
   the same shapes, only the first one allocates memory, and every tensor has the same
   address in each step. No call needs more than 100 KB of stack. A context with desc.dry
   measures how much memory a program needs, without computing anything.

   Errors are sticky. The first error is stored in the context; after it, calls do nothing
   and ops return NULL. Ops also accept NULL inputs and then return NULL, so a chain of
   ops needs one check at its end. The error text (stx_error) names the op, the expected
   and the actual value, and the option to change.

   Threads. A context may be used by one thread at a time. There is no global state, so
   separate contexts can be used by several threads at the same time. Each context has
   its own worker threads (desc.threads). Work is distributed dynamically, so that a busy
   processor does not delay the others.

   Repeatability. Runs with the same device, build and precision are bit-identical. In
   f32, so are runs on different processors, with different compilers and numbers of
   threads; docs/bits.md has the details. Sums have a fixed order, and no kernel adds
   floating-point values atomically. Random numbers are counter-based (Philox4x32-10),
   keyed by seed, step, op and element. They need no storage, and a resumed run draws the
   same numbers as an uninterrupted one.

   CPU. Compile with -O2 or -O3; unoptimised code is about 20 times slower. -march is not
   needed: inner loops are compiled for AVX-512, AVX2, NEON and the base instruction set,
   and the version is selected at run time. desc.precision = STX_PREC_BF16 rounds the
   inputs of matmuls to bfloat16, which roughly doubles their speed with AVX512-BF16. AMX,
   and BFDOT on ARM, are used if the processor has them. Parameters and sums remain float.
   The speed of generation is limited by reading the weights from memory; stx_params_pack
   stores them in 2 bytes or about 1 byte each.

   GPU. Compile seqtx_cuda.cu (nvcc -O3 -arch=sm_90 -c seqtx_cuda.cu; CUDA 12 or later,
   sm_80 or newer) and link it with -lcublasLt -lcudart -lstdc++. Define SEQTX_CUDA in
   every file that includes this header and set desc.device = STX_CUDA. Models need no
   changes. t->data is then a device address, which the host must not access: use
   stx_get, stx_set and stx_item, which copy and wait for the device. stx_metric_set
   stores a scalar without interrupting the step, stx_metric_get reads it afterwards, and
   stx_step_run replays a step as a CUDA graph. desc.precision = STX_PREC_BF16 stores
   activations as bfloat16. GPU and CPU results are equal up to the order of sums. Random
   numbers are the same, and checkpoints can be moved between the devices.

   Several processes. With SEQTX_MPI or SEQTX_NCCL, a program that is started N times
   trains one model: each process calls stx_group_join and computes its share of the
   batch, and stx_optim_step uses the mean of all gradients. See >>api: group.

   Floating point. The library rounds to nearest, masks all exceptions and, in its loops,
   flushes denormals to zero, whatever the settings of the calling thread. The thread's
   rounding mode, traps and status flags are restored when a function returns. Callbacks
   (ops, stx_recompute, stx_param_apply, stx_part) run in the library's environment. The
   threads of a BLAS use their own settings. In C code built by a compiler that lacks
   __attribute__((cleanup)), such as Microsoft's, only loops are protected in this way.

   Adding an op. An op checks its inputs, allocates its result, computes it and records a
   backward function, which is given the gradient of the result and adds to the gradients
   of the inputs. A test compiles and runs this program.

   //>own_op
       #define SEQTX_IMPLEMENTATION
       #include "seqtx.h"
       #include <stdio.h>

       static void square_back(stx_ctx *x, stx_tensor *y, stx_tensor *const *in,
                               void *save) {
           stx_real *da = stx_grad(x, in[0], NULL);
           (void)save;
           for (size_t i = 0; da && i < y->size; i++)
               da[i] += 2 * in[0]->data[i] * y->grad[i];
       }

       static stx_tensor *square(stx_ctx *x, stx_tensor *a) {
           if (!stx_ok(x) || !a) return NULL;
           stx_tensor *y = stx_new(x, a->dim[0], a->dim[1], a->dim[2], a->dim[3]);
           if (!y) return NULL;
           for (size_t i = 0; i < a->size; i++) y->data[i] = a->data[i] * a->data[i];
           stx_record(x, y, &a, 1, square_back, NULL);
           return y;
       }

       int main(void) {
           stx_ctx *x = stx_create(NULL);
           stx_real v[3] = {1, 2, 3}, dv[3] = {0, 0, 0};
           stx_begin(x, STX_TRAIN);
           stx_tensor *a = stx_variable(x, v, 3, 0, 0, 0);
           stx_backward(x, stx_sum(x, square(x, a)));
           stx_get_grad(x, a, dv);
           printf("%g %g %g %s\n", dv[0], dv[1], dv[2], stx_error(x));    // 2 4 6
           int failed = !stx_ok(x) || dv[2] != 6;
           stx_destroy(x);
           return failed;
       }
   //<own_op

   This op runs on the CPU, in one thread. stx_parallel runs loops on the threads of the
   context, the macros in >>loops compile them for each instruction set, and STX_KERNEL
   and STX_RUN add a CUDA version. examples/own_family.c is a complete model family.

   Compile-time options. Every file that includes this header must define the same ones.
   Options marked (i) are read only where SEQTX_IMPLEMENTATION is defined.

       option                 effect
       ---------------------  ----------------------------------------------------------
       SEQTX_DOUBLE           stx_real is double, for gradient checks. Default: float
       SEQTX_STATIC           all functions are private to the including file
       SEQTX_API              attribute of every function, for shared libraries. With
                              -fvisibility=hidden: __attribute__((visibility("default"))).
                              On Windows: __declspec(dllexport) in the library,
                              __declspec(dllimport) in programs that use it
       SEQTX_CUDA             STX_CUDA is available, see "GPU"
       SEQTX_NCCL             groups of processes on GPUs, over NCCL. Also for
                              seqtx_cuda.cu; link with -lnccl
       SEQTX_MPI (i)          groups of processes over MPI; compile with mpicc
       SEQTX_CBLAS (i)        matmuls call cblas_sgemm or cblas_dgemm, except in bf16
                              contexts; link with a BLAS. On macOS, link with -framework
                              Accelerate, or set -DSEQTX_CBLAS=2 for another BLAS
       SEQTX_UNFUSED (i)      processors without fused multiply-adds round products:
                              faster, but with other results. Default: fused in
                              software, docs/bits.md
       SEQTX_NO_THREADS (i)   loops run in the calling thread. Default: POSIX or Windows
                              threads
       SEQTX_STDIO_FILES (i)  files are read and written with stdio, without mmap and
                              fsync, as on systems without POSIX

   Macros of other headers. Macros named with a single capital letter, such as I in
   complex.h, may be defined before this header is included if the compiler supports
   #pragma push_macro (gcc, clang, Microsoft's). The header hides them and restores them
   at its end. If a macro has the name of a member that your code uses, such as ids->B,
   undefine it.

   Windows. MinGW gcc requires -Wa,-muse-unaligned-vector-move (binutils 2.38 or later)
   for every file that implements a part of the library or contains kernels. Without it,
   portable loops run instead of AVX2 and AVX-512. clang does not need it.

   How this file is arranged. The API comes first, in sections that begin with
   "// >>api: ..". An op and the kernels that it runs are declared next to each other. The
   implementation follows, from the lowest layer to the highest, with one section for each
   subject: >>layernorm contains the op with its shape rule and its backward function, and
   the kernels, forward and backward. seqtx_cuda.cu has the CUDA kernels under the same
   section names. grep '// >>' lists the sections.

   Reading order for learners
       >>tape         how gradients are computed: stx_backward
       >>loops        STX_LOOP: a loop in C, compiled for each instruction set
       >>layernorm    an op, its kernel and the derivative
       >>gemm         stx_gemm_plain defines a matmul; stx__gemm_blocked computes it
       >>attention    stx_attention_plain defines attention; stx__attn_fwd_unit computes
                      it tile by tile
       >>optimisers   stx_optim_step; Muon: stx__muon_orthogonalise
   docs/design.md explains why the library is built this way.
*/

#ifndef STX__LETTERS
#define STX__LETTERS 1
#include "seqtx.h"      /* hides macros named A to Z: see the end of this file */

#ifndef SEQTX_H
#define SEQTX_H

#include "api/config.h"

#ifdef __cplusplus
extern "C" {
#endif

#include "api/context.h"
#include "api/ops.h"
#include "api/attention.h"
#include "api/private.h"
#include "api/train.h"
#include "api/cuda.h"
#include "api/files.h"
#include "api/lm.h"
#include "api/models.h"

#ifdef __cplusplus
}
#endif

/* Stop reading here if you only want the API. */
#endif /* SEQTX_H */

/* Building blocks of inner loops, for the kernels of this library and for new ones.
   Programs that only use models do not need them. If kernels are in a separate file from
   the implementation, that file must define STX_LOOPS and include this header again.

       STX_LOOP, STX_INNER, STX_EACH_ISA,   one loop in C, compiled for each instruction
           STX_CALL, STX_RESTRICT, STX_FMA  set
       STX_STRICT_ON, STX_STRICT_OFF        around code that -ffast-math must not reorder
       stx_prefetch                         loads memory into the caches
       stx_fast_exp, _tanh, _sqrt, _phi,    scalar functions that compilers vectorise
           _sigmoid
       stx_fast_sum, _dot, _lanes           sums of a row, in a fixed order
       stx_math_exp, _log, _pow, _sin,      in double, the same on every machine
           _cos */
#if (defined(SEQTX_IMPLEMENTATION) || defined(STX_LOOPS)) && !defined(STX_LOOPS_DONE)
#define STX_LOOPS_DONE

#include "core/loops.h"
#include "core/maths.h"
#include "core/functions.h"

#endif /* STX_LOOPS */


#if defined(SEQTX_IMPLEMENTATION) && !defined(SEQTX_IMPLEMENTATION_DONE)
#define SEQTX_IMPLEMENTATION_DONE

#include "core/platform.h"

STX_STRICT_ON

/* core: contexts, memory, tensors, the tape, threads */
#include "core/context.h"
#include "core/arena.h"
#include "core/text.h"
#include "core/tensors.h"
#include "core/rules.h"
#include "core/tape.h"
#include "core/threads.h"
#include "core/sums.h"

/* gemm: matrix multiplication */
#include "gemm/micro.h"
#include "gemm/blocked.h"
#include "gemm/gemv.h"
#include "gemm/run.h"
#include "gemm/x86.h"
#include "gemm/x86_bf16.h"
#include "gemm/arm.h"
#include "gemm/wasm.h"
#include "gemm/choose.h"
#include "gemm/packed.h"

/* ops: each op with its CPU kernels */
#include "ops/elementwise.h"
#include "ops/dropout.h"
#include "ops/rezero.h"
#include "ops/softmax.h"
#include "ops/layernorm.h"
#include "ops/embedding.h"
#include "ops/shape.h"
#include "ops/matmul.h"
#include "ops/linear.h"
#include "ops/mean.h"
#include "ops/cross_entropy.h"
#include "ops/mse.h"
#include "ops/attention.h"
#include "ops/attention_plain.h"
#include "ops/attention_map.h"
#include "ops/attention_tiles.h"
#include "ops/attention_fwd.h"
#include "ops/attention_few.h"
#include "ops/attention_work.h"
#include "ops/attention_bwd.h"
#include "ops/adaptive.h"

/* train: metrics, groups of ranks, optimisers, steps */
#include "train/report.h"
#include "train/group.h"
#include "train/group_mpi.h"
#include "train/group_nccl.h"
#include "train/group_join.h"
#include "train/optim_kernels.h"
#include "train/muon.h"
#include "train/optim.h"
#include "train/steps.h"
#include "train/schedules.h"

/* io: safetensors files and checkpoints */
#include "io/map.h"
#include "io/header.h"
#include "io/reading.h"
#include "io/replace.h"
#include "io/writer.h"
#include "io/checkpoint.h"

/* lm: the common parts of language models */
#include "lm/sampling.h"
#include "lm/vocab_io.h"
#include "lm/memory.h"
#include "lm/memory_streams.h"
#include "lm/cache.h"

/* creates a context from the above, and models from files */
#include "create.h"
#include "models.h"

STX_STRICT_OFF

#endif /* SEQTX_IMPLEMENTATION */

#define STX__LETTERS 2
#include "seqtx.h"      /* restores these macros */

#else   /* STX__LETTERS */

/* Other headers may define macros of one capital letter: complex.h defines I, and
   stb_vorbis defines L, C and R. This file includes itself, and the family headers
   include it, with STX__LETTERS set to 1 to hide such macros and to 2 to restore them. */
  #if (defined(__GNUC__) || defined(__clang__) || defined(_MSC_VER)) && !defined(__CUDACC__)
    #if STX__LETTERS == 1
      #pragma push_macro("A")
      #undef A
      #pragma push_macro("B")
      #undef B
      #pragma push_macro("C")
      #undef C
      #pragma push_macro("D")
      #undef D
      #pragma push_macro("E")
      #undef E
      #pragma push_macro("F")
      #undef F
      #pragma push_macro("G")
      #undef G
      #pragma push_macro("H")
      #undef H
      #pragma push_macro("I")
      #undef I
      #pragma push_macro("J")
      #undef J
      #pragma push_macro("K")
      #undef K
      #pragma push_macro("L")
      #undef L
      #pragma push_macro("M")
      #undef M
      #pragma push_macro("N")
      #undef N
      #pragma push_macro("O")
      #undef O
      #pragma push_macro("P")
      #undef P
      #pragma push_macro("Q")
      #undef Q
      #pragma push_macro("R")
      #undef R
      #pragma push_macro("S")
      #undef S
      #pragma push_macro("T")
      #undef T
      #pragma push_macro("U")
      #undef U
      #pragma push_macro("V")
      #undef V
      #pragma push_macro("W")
      #undef W
      #pragma push_macro("X")
      #undef X
      #pragma push_macro("Y")
      #undef Y
      #pragma push_macro("Z")
      #undef Z
    #else
      #pragma pop_macro("A")
      #pragma pop_macro("B")
      #pragma pop_macro("C")
      #pragma pop_macro("D")
      #pragma pop_macro("E")
      #pragma pop_macro("F")
      #pragma pop_macro("G")
      #pragma pop_macro("H")
      #pragma pop_macro("I")
      #pragma pop_macro("J")
      #pragma pop_macro("K")
      #pragma pop_macro("L")
      #pragma pop_macro("M")
      #pragma pop_macro("N")
      #pragma pop_macro("O")
      #pragma pop_macro("P")
      #pragma pop_macro("Q")
      #pragma pop_macro("R")
      #pragma pop_macro("S")
      #pragma pop_macro("T")
      #pragma pop_macro("U")
      #pragma pop_macro("V")
      #pragma pop_macro("W")
      #pragma pop_macro("X")
      #pragma pop_macro("Y")
      #pragma pop_macro("Z")
    #endif
  #endif
  #undef STX__LETTERS
#endif  /* STX__LETTERS */

/*
This software is available under two licences. Choose the one that you prefer.

------------------------------------------------------------------------------------------
ALTERNATIVE A - MIT License

Copyright (c) 2026 the seqtx authors

Permission is hereby granted, free of charge, to any person obtaining a copy of this
software and associated documentation files (the "Software"), to deal in the Software
without restriction, including without limitation the rights to use, copy, modify, merge,
publish, distribute, sublicense, and/or sell copies of the Software, and to permit persons
to whom the Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or
substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED,
INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR
PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE
FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER
DEALINGS IN THE SOFTWARE.

------------------------------------------------------------------------------------------
ALTERNATIVE B - Public Domain (www.unlicense.org)

This is free and unencumbered software released into the public domain.

Anyone is free to copy, modify, publish, use, compile, sell, or distribute this software,
either in source code form or as a compiled binary, for any purpose, commercial or
non-commercial, and by any means.

In jurisdictions that recognize copyright laws, the author or authors of this software
dedicate any and all copyright interest in the software to the public domain.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED. IN NO
EVENT SHALL THE AUTHORS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN
ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE
SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
------------------------------------------------------------------------------------------
*/
