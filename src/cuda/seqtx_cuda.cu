/* seqtx_cuda.cu - v0.2 - CUDA kernels of seqtx, and its device layer
   no warranty implied; MIT or public domain, your choice (see the end of seqtx.h)

   Compile this file with nvcc. Define SEQTX_CUDA when you compile the program:

       nvcc -O3 -arch=sm_90 -c seqtx_cuda.cu
       cc -DSEQTX_CUDA .. program.c .. seqtx_cuda.o -lcublasLt -lcudart -lstdc++ -lm

   Needs seqtx.h in the same directory, CUDA 12 or newer, and sm_80 or newer. For groups
   of GPUs, add -DSEQTX_NCCL to both commands and -lnccl (NCCL 2.14 or newer). There is no
   double precision: SEQTX_DOUBLE is for the CPU.

   Contents. A function `stem_cuda` is the CUDA twin of the kernel `stem` in seqtx.h. It
   takes the same arguments, with device pointers, enqueues its work on the context's
   stream and returns without waiting. `grep stx_mse_bwd seqtx*` finds the declaration,
   the CPU body and the CUDA body. The kernels of a model family are compiled if its
   header is in this directory and are omitted otherwise.

   Arrangement. Sections have the same names as in seqtx.h, and nearly the same order, so
   `grep '>>softmax' seqtx*` finds an op, its CPU kernels and its CUDA kernels. Sections
   that only a GPU needs come before and after these.

       section                       contents
       ----------------------------  ----------------------------------------------------
       >>common                      device arrays, warp sums, PTX, the device, launches
       >>waiting                     runtime errors, waits, scratch memory
       >>shares, sums, fill, ..      row and column sums, deferred sums, copies
       >>gemm                        cublasLt and its plans, split K
       >>add, .. >>rezero            elementwise kernels
       >>softmax                     one warp or one block per row
       >>layernorm                   rows in registers, two-stage column sums
       >>embedding                   tokens sorted by id: sums without atomics
       >>linear                      epilogues
       >>mean, >>cross_entropy,      losses; tokens sorted by cluster
       >>mse
       >>attention: ..               the fused attention, see docs/cuda.md, and its oracle
       >>adaptive input and output   cluster log probabilities
       >>report                      metrics
       >>optimisers                  norms, clipping and updates, all on the device
       >>group: streams              parts of >>group that the device layer needs
       >>device, >>graph             memory, transfers, reports; captured steps
       >>group                       exchanges between ranks, with NCCL
       >>recurrence                  seqtx_sru.h
       >>groups .. >>gates           seqtx_compressive.h
       >>gate .. >>latency           seqtx_par.h

   Reading order: >>common, >>add, >>layernorm (rows in registers, two-stage sums),
   >>embedding (ordered sums of repeated rows), >>gemm, >>attention, then the rest.

   Letters. A section that uses other letters declares them.
       N  rows of a matrix       C  columns of a row        V  vocabulary
       B  streams                H  heads                   D  head dimension
       As template parameters: W elements per memory access (4 or 1), Q groups of 4
          elements per lane, T threads per row (32, 256 or 1024)
       M, N, K in >>gemm: C (M,N) = op(A) (M,K) op(B) (K,N)
       O  outputs of a linear layer, Ci its inputs (I if the layer has only one input)
   n is a number of elements; ldx is the distance between rows of x in elements. In a
   launcher, the capital letter of an argument (Y for y) is the stx__array that is passed
   to the kernel.

   How a kernel is written

       // y (n) = s a (n). A thread computes W adjacent elements at a time.
       template <int W>
       STX__GLOBAL(256)
       stx__example_kernel(stx__array y, stx__array a, size_t n, float s) {
           STX__STEP(i, n, W) {
               float v[W];
               stx__getn<W>(v, a, i);
               for (int e = 0; e < W; e++) v[e] *= s;
               stx__putn<W>(y, i, v);
           }
       }

       void stx_example_cuda(stx_ctx *x, stx_real *y, const stx_real *a, size_t n,
                             stx_real s) {
           stx__array Y = stx__array_of(x, y), A = stx__array_of(x, a);
           const int four = n % 4 == 0 && stx__aligned4(Y) && stx__aligned4(A);
           if (n) STX__RUN_BY(x, "stx_example", four, stx__example_kernel, n, Y, A, n, s);
       }

   STX__GLOBAL(threads) begins a kernel and states the largest block that it may be
   launched with. STX__RUN_KERNEL, or a macro that uses it, launches the kernel and checks
   the launch. STX__SHARED declares an array in shared memory. tests/cuda_host defines
   these names for the host compiler, runs every kernel on the CPU and compares it with
   the CPU kernel.

   Memory kinds. The element type of an array follows from its address: stx_cuda_alloc
   takes a memory kind, and stx__array_of looks up the allocation that contains the
   pointer.

       kind                   STX_PREC_F32    STX_PREC_BF16
       ---------------------  --------------  ----------------------------------------
       STX_MEM_ACTIVATIONS    float           bfloat16
       STX_MEM_PARAMS         float           float, plus a bfloat16 copy, the twin
       STX_MEM_BYTES          float or bytes  float or bytes

   Kernels that write a parameter also write its twin (stx__put does both); GEMMs and the
   attention read the twin. Thus the same kernel works in all precisions, and a call can
   mix bfloat16 activations with float statistics. Kernels that need many loads in flight
   have instances for one storage type (stx__access).

   Deferred sums. The gradients of biases, gains and weights are sums over thousands of
   rows. They are computed in two stages: one kernel computes a partial sum for each chunk
   of rows, and a second kernel adds the partial sums in a fixed order. During
   stx_backward the second stage is deferred (stx_cuda_defer_sums), and one launch
   finishes up to 24 sums. It runs when the table or the buffer is full, before gradients
   are sent to other ranks, and at the end of the backward pass. See >>shares, sums.

   Capture. A step can be captured as a CUDA graph and replayed (stx_step_run). A
   captured step must not allocate, wait, or transfer data between host and device: such
   a step is marked as not repeatable and its graph is discarded. Values that change
   between replays are read from device memory: tokens, learning rate, scalars, and
   g->shift, which is added to the stream number of every Philox call. Steps run once
   before they are captured, so scratch memory, GEMM plans and kernel modules exist by
   then.

   Rules for all kernels
   - No atomics. Every sum has a fixed order, which depends on sizes alone, so a run
     repeats bit-exactly on the same GPU.
   - A step never waits, and allocates memory only when it first runs.
   - Sums are computed in float or double, regardless of the storage type.
   - A grid may have fewer threads than there are elements, because kernels loop over
     their elements. Results do not depend on the grid size. */

#include "common.cuh"
#include "wait.cuh"
#include "sums.cuh"
#include "gemm_plans.cuh"
#include "gemm.cuh"
#include "elementwise.cuh"
#include "softmax.cuh"
#include "layernorm.cuh"
#include "embedding.cuh"
#include "linear.cuh"
#include "loss.cuh"
#include "attention_plain.cuh"
#include "attention_plain_calls.cuh"
#include "attention_common.cuh"
#include "attention_fwd_tiles.cuh"
#include "attention_fwd.cuh"
#include "attention_bwd_common.cuh"
#include "attention_bwd_queries.cuh"
#include "attention_bwd_keys.cuh"
#include "attention_bwd_diagonals.cuh"
#include "attention_bwd.cuh"
#include "attention.cuh"
#include "adaptive.cuh"
#include "optim.cuh"
#include "group_streams.cuh"
#include "device.cuh"
#include "graph.cuh"
#include "group.cuh"
#include "sru.cuh"
#include "comp.cuh"
#include "comp_gates.cuh"
#include "par_gate.cuh"
#include "par_mix.cuh"
