# seqtx: header-only; this builds the examples and the tests.
#
#   make demo [DATA=FILE]   train a small model on real text, about two minutes on two cores; leaves build/demo.safetensors
#   make demo-sru           the same with SRU++; leaves build/demo_sru.safetensors
#   make test               build and run every test; ends with "N passed, N failed"
#   make examples           build/train_attn_span, build/train_sru, build/hello
#   make bench              timings, against CBLAS and PyTorch where they are installed
#   make cuda CUDA_ARCH=sm_90         build/cuda: the same programs with CUDA (several: CUDA_ARCH="sm_80 sm_90"; sm_80 and newer)
#   make check-cuda CUDA_ARCH=sm_90   the tests of the GPU's side on a GPU, also under compute-sanitizer where there is one
#   make bench-cuda CUDA_ARCH=sm_90   timings on a GPU against PyTorch
#
# Set CC, CXX, ARCH (-march=native, say: the fast paths do not need it), THREADS=-DSEQTX_NO_THREADS (to build without threads), CBLAS=1 (to link a CBLAS),
# ONEDNN=1 (oneDNN; ONEDNN_FLAGS and ONEDNN_LIBS where it is not in the usual places: -I.., -L.. -ldnnl).

CC      = cc
CXX     = c++
ARCH    =
WARN    = -Wall -Wextra -Wpedantic -Wshadow -Werror
THREADS = -pthread
CFLAGS  = -std=c99 -O3 $(ARCH) $(WARN)
ifdef CBLAS
CFLAGS += -DSEQTX_CBLAS
LDLIBS += $(or $(CBLAS_LIBS),-lopenblas)
endif
ifdef ONEDNN
CFLAGS += -DSEQTX_ONEDNN -fopenmp $(ONEDNN_FLAGS)
LDLIBS += $(or $(ONEDNN_LIBS),-ldnnl)
endif
SAN     = -fsanitize=address,undefined -fno-sanitize-recover=all -g -O1

HEADERS = $(wildcard seqtx*.h) build/flags
TESTS_H = $(wildcard tests/*.h)

.PHONY: all examples demo demo-sru test bench cuda check-cuda bench-cuda clean FORCE
all: examples
examples: build/train_attn_span build/train_sru build/hello

build:
	@mkdir -p build
# build/flags changes when the flags do, and everything is built again
build/flags: FORCE | build
	@echo '$(CC) $(CXX) $(CFLAGS) $(THREADS) $(LDLIBS)' | cmp -s - $@ || echo '$(CC) $(CXX) $(CFLAGS) $(THREADS) $(LDLIBS)' > $@
FORCE:

build/train_attn_span: examples/train_attn_span.c examples/train.h $(HEADERS) | build
	$(CC) $(CFLAGS) $(THREADS) $< -o $@ -lm $(LDLIBS)
build/train_sru: examples/train_sru.c examples/train.h $(HEADERS) | build
	$(CC) $(CFLAGS) $(THREADS) $< -o $@ -lm $(LDLIBS)
build/hello: examples/hello.c $(HEADERS) | build
	$(CC) $(CFLAGS) $(THREADS) $< -o $@ -lm $(LDLIBS)

# >>demo
build/demo.txt: examples/demo_data.sh | build
	sh examples/demo_data.sh $@
DATA = build/demo.txt
demo: build/train_attn_span $(DATA)
	@rm -f build/demo.safetensors
	build/train_attn_span --preset demo --data $(DATA) --checkpoint build/demo.safetensors --generate 500 --prompt "#ifndef _"

demo-sru: build/train_sru $(DATA)
	@rm -f build/demo_sru.safetensors
	build/train_sru --preset demo --data $(DATA) --checkpoint build/demo_sru.safetensors --generate 500 --prompt "#ifndef _"

# >>tests: each program prints "N passed, N failed"; tests/run.sh adds them up
TSAN := $(shell echo 'int main(void){return 0;}' | $(CC) -fsanitize=thread -x c - -o /dev/null 2>/dev/null && echo build/test_threads_tsan)
UNIT = build/test_api build/test_threads $(TSAN) build/test_io build/test_train_h build/test_span build/test_golden_ops build/test_golden_span build/test_bf16 build/test_sru build/test_golden_sru
F64  = build/test_grad build/test_golden_ops_f64 build/test_golden_span_f64 build/test_bf16_f64 build/test_sru_f64 build/test_golden_sru_f64
ASAN = build/test_api_san build/test_io_san build/test_span_san build/test_golden_ops_san build/test_golden_span_san build/fuzz_io_san build/test_bf16_san build/test_sru_san build/test_golden_sru_san

# The library is compiled once for each configuration, a header to an object (of tests/inner/NAME.c where there is one); the programs
# have declarations only and link all objects. What a file depends on the compiler writes down: DEPS.
PARTS   = $(patsubst %.h,%,$(wildcard seqtx*.h))
OBJECTS = $(patsubst %,build/lib_$(1)/%.o,$(PARTS))
MACRO   = SEQTX_$(shell echo '$(patsubst seqtx_%,%_,$(filter-out seqtx,$(1)))' | tr a-z A-Z)IMPLEMENTATION
DEPS    = -MMD -MP -MF $@.d -MT $@
define library
build/lib_$(1)/%.o: build/flags
	@mkdir -p $$(@D)
	$(2) $$(DEPS) -D$$(call MACRO,$$*) -x c -c $$(firstword $$(wildcard tests/inner/$$*.c) $$*.h) -o $$@
endef
F32FLAGS = $(CFLAGS) $(THREADS)
F64FLAGS = $(CFLAGS) -DSEQTX_DOUBLE $(THREADS)
SANFLAGS = -std=c99 $(WARN) $(SAN) $(THREADS)
$(eval $(call library,f32,$$(CC) $$(F32FLAGS)))
$(eval $(call library,f64,$$(CC) $$(F64FLAGS)))
$(eval $(call library,san,$$(CC) $$(SANFLAGS)))
.SECONDARY:

# these have the implementation inside
build/test_api build/test_bf16: build/test_%: tests/test_%.c build/flags | build
	$(CC) $(F32FLAGS) $(DEPS) $< -o $@ -lm $(LDLIBS)
build/test_bf16_f64: tests/test_bf16.c build/flags | build
	$(CC) $(F64FLAGS) $(DEPS) $< -o $@ -lm $(LDLIBS)
build/test_api_san: tests/test_api.c build/flags | build
	$(CC) $(SANFLAGS) $(DEPS) $< -o $@ -lm
build/test_bf16_san: tests/test_bf16.c build/flags | build
	$(CC) $(SANFLAGS) -DSEQTX_AMX_EMULATED $(DEPS) $< -o $@ -lm
build/test_threads_tsan: tests/test_threads.c build/flags | build
	$(CC) -std=c99 $(WARN) -O1 -g -fsanitize=thread -DTEST_TSAN -DSEQTX_IMPLEMENTATION $(THREADS) $(DEPS) $< -o $@ -lm
build/test_train_h: tests/test_train_h.c build/flags | build
	$(CC) $(CFLAGS) $(DEPS) $< -o $@ -lm
# and these link it; their own code at -O1, which its loops do not notice
build/test_grad: tests/test_grad.c $(call OBJECTS,f64)
	$(CC) $(F64FLAGS) -O1 $(DEPS) $< $(call OBJECTS,f64) -o $@ -lm $(LDLIBS)
build/test_%_f64: tests/test_%.c $(call OBJECTS,f64)
	$(CC) $(F64FLAGS) -O1 $(DEPS) $< $(call OBJECTS,f64) -o $@ -lm $(LDLIBS)
build/test_%_san: tests/test_%.c $(call OBJECTS,san)
	$(CC) $(SANFLAGS) $(DEPS) $< $(call OBJECTS,san) -o $@ -lm
build/fuzz_io_san: tests/fuzz_io.c $(call OBJECTS,san)
	$(CC) $(SANFLAGS) $(DEPS) $< $(call OBJECTS,san) -o $@ -lm
build/test_%: tests/test_%.c $(call OBJECTS,f32)
	$(CC) $(F32FLAGS) -O1 $(DEPS) $< $(call OBJECTS,f32) -o $@ -lm $(LDLIBS)

# >>cuda on the host: seqtx_cuda.cu by the host's compiler (tests/cuda_host), so that every kernel runs where there is no GPU
SHIM    = build/test_cuda_ops build/test_cuda_sru build/test_cuda_gemm build/test_cuda_attention build/test_cuda_model build/test_cuda_golden_ops build/test_cuda_golden_span build/test_cuda_golden_sru build/test_shim
SHIM_S  = build/test_cuda_ops_san build/test_cuda_sru_san build/test_cuda_gemm_san build/test_cuda_attention_san build/test_shim_san
SHIM_H  = $(wildcard tests/cuda_host/*.h)
CXXHOST = -std=c++17 $(WARN) -Itests/cuda_host
CXXSHIM = $(CXXHOST) -Wno-unused-function -Wno-unknown-pragmas -Wno-maybe-uninitialized -DSEQTX_CUDA -DSEQTX_CUDA_HOST
CUFLAGS = $(CFLAGS) -DSEQTX_CUDA -DSEQTX_CUDA_HOST
CUSAN   = -std=c99 $(WARN) $(SAN) $(STACK) -DSEQTX_CUDA -DSEQTX_CUDA_HOST
STACK   := $(shell printf 'int main(void){return 0;}' | $(CXX) --param asan-stack=0 -x c++ - -o /dev/null 2>/dev/null && echo --param asan-stack=0 || echo -mllvm -asan-stack=0)
build/cuda_host.o: tests/cuda_host/cuda_host.cpp $(SHIM_H) $(HEADERS) | build
	$(CXX) $(CXXHOST) -O2 -c $< -o $@
build/cuda_kernels.o: seqtx_cuda.cu $(SHIM_H) $(HEADERS) | build
	$(CXX) $(CXXSHIM) -O2 -x c++ -c $< -o $@
build/cuda_host_san.o: tests/cuda_host/cuda_host.cpp $(SHIM_H) $(HEADERS) | build
	$(CXX) $(CXXHOST) -O2 -DCUDA_HOST_ASAN -c $< -o $@
# not all of -fsanitize=undefined: with null and the rest these templates take three times as long to compile
build/cuda_kernels_san.o: seqtx_cuda.cu $(SHIM_H) $(HEADERS) | build
	$(CXX) $(CXXSHIM) -fsanitize=address,alignment,shift,signed-integer-overflow -fno-sanitize-recover=all -O1 $(STACK) -x c++ -c $< -o $@
$(eval $(call library,cuda,$$(CC) $$(CUFLAGS)))
$(eval $(call library,cuda_san,$$(CC) $$(CUSAN)))
build/test_cuda_%.o: tests/test_cuda_%.c build/flags | build
	$(CC) $(CUFLAGS) -O1 $(DEPS) -c $< -o $@
build/test_cuda_golden_%.o: tests/test_golden_%.c build/flags | build
	$(CC) $(CUFLAGS) -O1 $(DEPS) -DGOLDEN_DEVICE=STX_CUDA -c $< -o $@
build/test_cuda_%_san.o: tests/test_cuda_%.c build/flags | build
	$(CC) $(CUSAN) $(DEPS) -c $< -o $@
$(filter build/test_cuda_%,$(SHIM)): build/test_cuda_%: build/test_cuda_%.o build/cuda_kernels.o build/cuda_host.o $(call OBJECTS,cuda)
	$(CXX) $^ -o $@ -lm -lpthread $(LDLIBS)
$(filter build/test_cuda_%,$(SHIM_S)): build/test_cuda_%_san: build/test_cuda_%_san.o build/cuda_kernels_san.o build/cuda_host_san.o $(call OBJECTS,cuda_san)
	$(CXX) $(SAN) $^ -o $@ -lm -lpthread
build/test_shim: tests/cuda_host/test_shim.cpp tests/test.h build/cuda_host.o
	$(CXX) $(CXXHOST) -Wno-unknown-pragmas -O1 $< build/cuda_host.o -o $@ -lm -lpthread
build/test_shim_san: tests/cuda_host/test_shim.cpp tests/test.h build/cuda_host_san.o
	$(CXX) $(CXXHOST) -Wno-unknown-pragmas $(SAN) $(STACK) $< build/cuda_host_san.o -o $@ -lm -lpthread

build/train_shim: examples/train_attn_span.c examples/train.h $(HEADERS) build/cuda_kernels.o build/cuda_host.o
	$(CC) $(CFLAGS) -DSEQTX_CUDA -DSEQTX_CUDA_HOST -c $< -o build/train_shim.o
	$(CXX) build/train_shim.o build/cuda_kernels.o build/cuda_host.o -o $@ -lm -lpthread $(LDLIBS)

build/train_sru_shim: examples/train_sru.c examples/train.h $(HEADERS) build/cuda_kernels.o build/cuda_host.o
	$(CC) $(CFLAGS) -DSEQTX_CUDA -DSEQTX_CUDA_HOST -c $< -o build/train_sru_shim.o
	$(CXX) build/train_sru_shim.o build/cuda_kernels.o build/cuda_host.o -o $@ -lm -lpthread $(LDLIBS)

# >>cuda: seqtx_cuda.cu by nvcc, the rest by the C compiler
NVCC    = nvcc
CUDA_ARCH =
CUDA_DIR := $(shell d=$$(dirname "$$(command -v $(NVCC) 2>/dev/null)" 2>/dev/null); cd "$$d/.." 2>/dev/null && pwd)
CUDA_LIBS = -L$(CUDA_DIR)/lib64 -lcublasLt -lcudart -lstdc++ -lm
CUDA_TESTS = build/cuda/test_cuda_ops build/cuda/test_cuda_sru build/cuda/test_cuda_gemm build/cuda/test_cuda_attention build/cuda/test_cuda_model build/cuda/test_cuda_golden_ops build/cuda/test_cuda_golden_span build/cuda/test_cuda_golden_sru
GENCODE = $(foreach a,$(patsubst sm_%,%,$(CUDA_ARCH)),-gencode arch=compute_$(a),code=sm_$(a))
build/cuda:
	@mkdir -p build/cuda
build/cuda/arch: FORCE | build/cuda
	@sh tests/cuda_arch.sh "$(NVCC)" $(CUDA_ARCH)
	@echo '$(NVCC) $(CUDA_ARCH)' | cmp -s - $@ || echo '$(NVCC) $(CUDA_ARCH)' > $@
build/cuda/seqtx_cuda.o: seqtx_cuda.cu seqtx.h seqtx_sru.h build/cuda/arch
	$(NVCC) -O3 -std=c++17 $(GENCODE) -Xcompiler -Wall,-Wextra -c $< -o $@
build/cuda/train_attn_span: examples/train_attn_span.c examples/train.h $(HEADERS) build/cuda/seqtx_cuda.o
	$(CC) $(CFLAGS) $(THREADS) -DSEQTX_CUDA $< build/cuda/seqtx_cuda.o -o $@ $(CUDA_LIBS) $(LDLIBS)
build/cuda/train_sru: examples/train_sru.c examples/train.h $(HEADERS) build/cuda/seqtx_cuda.o
	$(CC) $(CFLAGS) $(THREADS) -DSEQTX_CUDA $< build/cuda/seqtx_cuda.o -o $@ $(CUDA_LIBS) $(LDLIBS)
$(eval $(call library,gpu,$$(CC) $$(F32FLAGS) -DSEQTX_CUDA))
build/cuda/test_cuda_%: tests/test_cuda_%.c build/cuda/seqtx_cuda.o $(call OBJECTS,gpu)
	$(CC) $(F32FLAGS) -DSEQTX_CUDA -O1 $(DEPS) $^ -o $@ $(CUDA_LIBS) $(LDLIBS)
build/cuda/test_cuda_golden_%: tests/test_golden_%.c build/cuda/seqtx_cuda.o $(call OBJECTS,gpu)
	$(CC) $(F32FLAGS) -DSEQTX_CUDA -O1 $(DEPS) -DGOLDEN_DEVICE=STX_CUDA $^ -o $@ $(CUDA_LIBS) $(LDLIBS)
build/cuda/bench_cuda: bench/bench_cuda.c bench/cuda_model.h bench/report.h $(HEADERS) build/cuda/seqtx_cuda.o
	$(CC) $(CFLAGS) $(THREADS) -DSEQTX_CUDA -isystem $(CUDA_DIR)/include $< build/cuda/seqtx_cuda.o -o $@ $(CUDA_LIBS) $(LDLIBS)
build/bench_cuda_host: bench/bench_cuda.c bench/cuda_model.h bench/report.h build/cuda_kernels.o build/cuda_host.o
	$(CC) $(CFLAGS) -DSEQTX_CUDA -DSEQTX_CUDA_HOST -c $< -o $@.o
	$(CXX) $@.o build/cuda_kernels.o build/cuda_host.o -o $@ -lm -lpthread $(LDLIBS)
cuda: build/cuda/train_attn_span build/cuda/train_sru $(CUDA_TESTS)
check-cuda: cuda
	@sh tests/check_cuda.sh
bench-cuda: build/cuda/bench_cuda
	sh bench/run_cuda.sh $(BENCH)

test: $(UNIT) $(F64) $(ASAN) $(SHIM) $(SHIM_S) build/train_shim build/train_sru_shim examples
	@CC="$(CC)" CXX="$(CXX)" NVCC="$(NVCC)" ONEDNN_FLAGS="$(ONEDNN_FLAGS)" ONEDNN_LIBS="$(ONEDNN_LIBS)" sh tests/run.sh

bench:
	CC="$(CC)" sh bench/run.sh $(BENCH)

-include $(wildcard build/*.d build/*/*.d)

clean:
	rm -rf build
