# tests.mk - the part of the Makefile for tests: programs, runs, `make test`. It uses the
# variables and functions of the Makefile, such as BUILD, c, say and LIB.


# >>tests. Each program prints "N passed, N failed"; tests/run.sh runs one and adds up
# all. tests/*/test_NAME.c run in float, in double and with sanitizers, except for those
# named here.
# FULL is set by `make test-all`. It adds the CUDA kernels under the address sanitizer
# (the host shim itself reports accesses outside of allocations), other platforms, all
# trainers as ranks, and more compilers and options in the scripts.
FULL ?= $(if $(filter %test-all,$(MAKECMDGOALS)),1)
export FULL
SOURCES    = $(wildcard tests/*/test_*.c)
ALL        = $(patsubst test_%.c,%,$(notdir $(SOURCES)))
vpath test_%.c $(sort $(dir $(SOURCES)))
ONLY       = grad train_h flags group $(filter cuda_%,$(ALL))
TESTS      = $(filter-out $(ONLY),$(ALL))
TESTS_F64  = grad $(filter-out bits io,$(TESTS))
TESTS_SAN  = $(TESTS)
TESTS_CUDA = $(patsubst cuda_%,%,$(filter cuda_%,$(ALL))) $(filter golden_%,$(ALL))
CUDA_SAN   = $(filter-out model golden_%,$(TESTS_CUDA))
# SHORT: an argument for tests that know it, with fewer repetitions for slow code whose
# threads and memory are the same.
SHORT      = $(if $(shell grep -l '"short"' tests/*/test_$(1).c),short)

$(filter-out $(BUILD)/test_bf16,$(TESTS:%=$(BUILD)/test_%)): \
		$(BUILD)/test_%: test_%.c $(call LIB,f32)
	$(call say,CC)$(T) $(call c,-O1 -I.) $(LINK)
# Its matmuls are those of the library, even if the other tests link a CBLAS.
$(BUILD)/test_bf16: tests/ops/test_bf16.c $(call LIB,$(if $(CBLAS),plain,f32))
	$(call say,CC)$(T) $(call c,-O1) $(LINK)
$(TESTS_F64:%=$(BUILD)/test_%_f64): $(BUILD)/test_%_f64: test_%.c $(call LIB,f64)
	$(call say,CC)$(T) $(call c,-O1 -I. -DSEQTX_DOUBLE) $(LINK)
SHIM_SAN = $(call LIB,san) $(BUILD)/cuda_kernels$(if $(FULL),_san).o $(BUILD)/cuda_host_san.o
ALL_SAN  = $(TESTS_SAN) $(CUDA_SAN:%=cuda_%)
LINK_SAN = $(CXX) $(CXXFLAGS) $(SAN) $(LDFLAGS) $(filter %.o,$^) -o $@ -lm -lpthread $(LDLIBS)
$(ALL_SAN:%=$(BUILD)/test_%_san.o): $(BUILD)/test_%_san.o: test_%.c $(BUILD)/flags
	$(call say,CC)$(T) $(SAN_F32) -I. $(DEPS) -c $< -o $@
$(ALL_SAN:%=$(BUILD)/test_%_san): $(BUILD)/test_%_san: $(BUILD)/test_%_san.o $(SHIM_SAN)
	$(call say,LD)$(LINK_SAN)
$(BUILD)/fuzz_io_san.o: tests/io/fuzz_io.c $(BUILD)/flags
	$(call say,CC)$(T) $(SAN_F32) $(DEPS) -c $< -o $@
$(BUILD)/fuzz_io_san: $(BUILD)/fuzz_io_san.o $(SHIM_SAN)
	$(call say,LD)$(LINK_SAN)
TSAN := $(shell echo 'int main(void){return 0;}' | $(CC) -fsanitize=thread -x c - -o /dev/null \
	2>/dev/null && echo threads_tsan)
$(BUILD)/test_threads_tsan: tests/core/test_threads.c $(BUILD)/flags
	$(call say,CC)$(T) $(CC) -std=c99 $(WARN) -Wno-unused-function $(THREADS) $(CPPFLAGS) \
		$(CFLAGS) -O1 -g1 -fsanitize=thread -DTEST_TSAN -DSEQTX_STATIC \
		-DSEQTX_IMPLEMENTATION $(DEPS) $(LDFLAGS) $< -o $@ -lm $(LDLIBS)
$(BUILD)/test_train_h: tests/trainers/test_train_h.c $(BUILD)/flags
	$(call say,CC)$(T) $(call c) $(DEPS) $(LDFLAGS) $< -o $@ -lm $(LDLIBS)


# >>cuda on the host: seqtx_cuda.cu compiled for the host (tests/cuda_host), so that all
# kernels run without a GPU.
host    = $(call cxx,-Itests/cuda_host $(1))
# FMA: fmaf as an instruction if the processor has it. As a call to the C library it takes
# most of the time of the kernels.
FMA    := $(shell grep -qm 1 '^flags.* fma ' /proc/cpuinfo 2>/dev/null && \
	echo -mfma -ffp-contract=off)
shim    = $(call host,$(FMA) -Wno-unused-function -Wno-unknown-pragmas -Wno-maybe-uninitialized \
	-DSEQTX_CUDA -DSEQTX_CUDA_HOST -DSEQTX_NCCL $(1))
STACK  := $(shell printf 'int main(void){return 0;}' | $(CXX) --param asan-stack=0 -x c++ - \
	-o /dev/null 2>/dev/null && echo --param asan-stack=0 || echo -mllvm -asan-stack=0)
# -O1, like the kernels: the CPU side of these tests takes little time.
CUDA_F32 = $(call c,-O1 -DSEQTX_CUDA -DSEQTX_CUDA_HOST -DSEQTX_NCCL)
$(eval $(call library,cuda,$$(CUDA_F32)))
SHIM      = $(call LIB,cuda) $(BUILD)/cuda_kernels.o $(BUILD)/cuda_host.o
LINK_SHIM = $(CXX) $(CXXFLAGS) $(LDFLAGS) $(filter %.o,$^) -o $@ -lm -lpthread $(LIBS)
$(BUILD)/cuda_host.o: tests/cuda_host/cuda_host.cpp $(BUILD)/flags
	$(call say,CXX)$(T) $(call host,$(FMA) -O3) $(DEPS) -c $< -o $@
# -O1: most of the run time is spent on the fibers in cuda_host.o.
$(BUILD)/cuda_kernels.o: tests/inner/seqtx_cuda.cu $(BUILD)/flags
	$(call say,CXX)$(T) $(call shim,-O1) $(DEPS) -x c++ -c $< -o $@
$(BUILD)/cuda_host_san.o: tests/cuda_host/cuda_host.cpp $(BUILD)/flags
	$(call say,CXX)$(T) $(call host,$(FMA) -O3 -DCUDA_HOST_ASAN) $(DEPS) -c $< -o $@
# Only the alignment checks of -fsanitize=undefined: shift and overflow checks of these
# templates take a quarter longer to compile, all checks three times as long.
$(BUILD)/cuda_kernels_san.o: tests/inner/seqtx_cuda.cu $(BUILD)/flags
	$(call say,CXX)$(T) $(call shim,-O1) -fsanitize=address,alignment \
		-fno-sanitize-recover=all $(STACK) $(DEPS) -x c++ -c $< -o $@

CUDA_NEW = $(filter-out golden_%,$(TESTS_CUDA))
$(CUDA_NEW:%=$(BUILD)/test_cuda_%.o): $(BUILD)/test_cuda_%.o: test_cuda_%.c $(BUILD)/flags
	$(call say,CC)$(T) $(CUDA_F32) $(DEPS) -c $< -o $@
$(patsubst %,$(BUILD)/test_cuda_%.o,$(filter golden_%,$(TESTS_CUDA))): \
		$(BUILD)/test_cuda_%.o: test_%.c $(BUILD)/flags
	$(call say,CC)$(T) $(CUDA_F32) $(DEPS) -DGOLDEN_DEVICE=STX_CUDA -c $< -o $@
$(TESTS_CUDA:%=$(BUILD)/test_cuda_%): $(BUILD)/test_cuda_%: $(BUILD)/test_cuda_%.o $(SHIM)
	$(call say,LD)$(LINK_SHIM)
$(BUILD)/test_shim.o: tests/cuda_host/test_shim.cpp $(BUILD)/flags
	$(call say,CXX)$(T) $(call host,-Wno-unknown-pragmas -O0) $(DEPS) -c $< -o $@
$(BUILD)/test_shim: $(BUILD)/test_shim.o $(BUILD)/cuda_host.o \
		$(BUILD)/lib_$(if $(CBLAS),plain,f32)/seqtx.o
	$(call say,LD)$(LINK_SHIM)
$(BUILD)/test_shim_san.o: tests/cuda_host/test_shim.cpp $(BUILD)/flags
	$(call say,CXX)$(T) $(call host,-Wno-unknown-pragmas) $(SAN) $(LESS) -O0 $(STACK) \
		$(DEPS) -c $< -o $@
$(BUILD)/test_shim_san: $(BUILD)/test_shim_san.o $(SHIM_SAN)
	$(call say,LD)$(LINK_SAN)
# the trainers with CUDA on the host
$(TRAINERS:%=%_shim.o): $(BUILD)/%_shim.o: examples/%.c $(BUILD)/flags
	$(call say,CC)$(T) $(CUDA_F32) $(DONE) $(DEPS) -c $< -o $@
$(TRAINERS:%=%_shim): %_shim: %_shim.o $(SHIM)
	$(call say,LD)$(LINK_SHIM)


# >>runs: the runs of `make test`. $(call RUN,NAME,PROGRAMS,COMMAND): run-NAME needs
# PROGRAMS and runs COMMAND.
define run
RUNS += $(1)
PROGRAMS += $(2)
run-$(1): $(2)
	@CC="$(COMPILE)" CXX="$(CXX)" NVCC="$(NVCC)" sh tests/run.sh $(1) $(3)
endef
RUN = $(eval $(call run,$(1),$(2),$(3)))
$(foreach t,$(filter-out bf16,$(TESTS)),$(call RUN,$(t),$(BUILD)/test_$(t),$(BUILD)/test_$(t)))
# in two parts, because `make quick` runs only the first
BF16_LONG = attention attention_cut attention_borders
$(call RUN,bf16,$(BUILD)/test_bf16,$(BUILD)/test_bf16 but $(BF16_LONG))
$(call RUN,bf16_attention,$(BUILD)/test_bf16,$(BUILD)/test_bf16 $(BF16_LONG))
$(call RUN,train_h,$(BUILD)/test_train_h,$(BUILD)/test_train_h)
# $(call RUN_TEST,SUFFIX,NAME,ARGUMENTS): runs build/test_NAMESUFFIX
RUN_TEST = $(call RUN,$(2)$(1),$(BUILD)/test_$(2)$(1),$(BUILD)/test_$(2)$(1) $(3))
$(foreach t,$(TESTS_F64),$(call RUN_TEST,_f64,$(t),$(call SHORT,$(t))))
QUICK := $(filter-out bf16_attention api_f64 comp_f64 span_f64 threads_f64,$(RUNS))
$(foreach t,$(TESTS_SAN),$(call RUN_TEST,_san,$(t),$(call SHORT,$(t))))
$(foreach t,$(TSAN),$(call RUN_TEST,,$(t),short))
$(call RUN,fuzz_io_san,$(BUILD)/fuzz_io_san,$(BUILD)/fuzz_io_san)
$(call RUN,cuda_host,$(BUILD)/test_shim,$(BUILD)/test_shim)
$(foreach t,$(TESTS_CUDA),$(call RUN_TEST,,cuda_$(t)))
$(call RUN,cuda_host_san,$(BUILD)/test_shim_san,$(BUILD)/test_shim_san)
$(if $(FULL),$(foreach t,$(CUDA_SAN),$(call RUN_TEST,_san,cuda_$(t),short)))
# $(call RUN_TRAINER,RUN,FAMILY,PROGRAMS): tests of a trainer, and of the same trainer
# with CUDA
TRAINER = $(BUILD)/train_$(1)
define RUN_TRAINER
$(call RUN,cuda_$(1),$(call TRAINER,$(2))_shim,\
	sh tests/trainers/trainer_cuda.sh $(2) $(call TRAINER,$(2))_shim)
$(call RUN,$(1),$(call TRAINER,$(2)) $(BUILD)/generate $(3),\
	sh tests/trainers/trainer.sh $(2) $(call TRAINER,$(2)))
endef
$(call RUN_TRAINER,trainer_par,par,$(BUILD)/cuts $(if $(SPM),$(BUILD)/spm_train))
$(call RUN_TRAINER,trainer,attn_span)
$(call RUN_TRAINER,trainer_sru,sru)
$(call RUN_TRAINER,trainer_compressive,compressive)
$(call RUN,plot,$(BUILD)/plot,sh tests/trainers/plot.sh)
$(call RUN,attention_map,$(BUILD)/attention_map $(BUILD)/train_compressive,\
	sh tests/trainers/attention_map.sh)
$(call RUN,pack,$(BUILD)/pack $(TRAINERS),sh tests/trainers/pack.sh)
$(call RUN,learn,$(BUILD)/plot,sh tests/trainers/learn.sh)
$(call RUN,claims,,sh tests/trainers/claims.sh)
$(call RUN,readme,examples,sh tests/build/readme.sh)
$(call RUN,form,,sh tests/build/form.sh)
$(call RUN,parts,,sh tests/build/parts.sh)
$(call RUN,flags,,sh tests/core/flags.sh)
$(call RUN,fenv_calls,,sh tests/core/fenv.sh)
$(call RUN,portability,,sh tests/build/portability.sh)
$(call RUN,embed,,sh tests/build/embed.sh)
$(call RUN,package,,sh tests/build/package.sh)
$(call RUN,commands,examples,sh tests/build/commands.sh)
WITH_LIBS = env LDLIBS="$(abspath $(SPM)) $(LIBS)"
$(call RUN,cookbook,$(BUILD)/train_attn_span $(BUILD)/plot $(BUILD)/attention_map \
	$(call LIB,f32) $(call LIB,f64),\
	$(WITH_LIBS) sh tests/build/cookbook.sh)
$(call RUN,cuda_make,,sh tests/cuda/cuda_make.sh)
ifneq ($(shell command -v $(NVCC) 2>/dev/null),)
$(call RUN,cuda_nvcc,,sh tests/cuda/cuda_regs.sh --shared sm_80 sm_90)
else
RUNS += cuda_nvcc
run-cuda_nvcc:
	@sh tests/run.sh --skip cuda_nvcc 'no nvcc'
endif
ifneq ($(WITH_MPI),)
$(call RUN,group,$(BUILD)/test_group,sh tests/trainers/group.sh --core $(BUILD)/test_group)
$(call RUN,distributed,$(BUILD)/mpi/train_attn_span,\
	$(WITH_LIBS) MPICC="$(MPICC)" sh tests/trainers/distributed.sh)
RANKS_OF = $(BUILD)/mpi/train_$(1) $(BUILD)/train_$(1)
$(foreach t,$(if $(FULL),$(TRAINERS:$(BUILD)/train_%=%),attn_span),\
	$(call RUN,group_$(t),$(call RANKS_OF,$(t)),sh tests/trainers/group.sh $(t) $(call RANKS_OF,$(t))))
else
RUNS += group distributed
run-group run-distributed:
	@sh tests/run.sh --skip $(@:run-%=%) 'no mpicc'
endif
RUNS += $(if $(FULL),cuda_nccl)
run-cuda_nccl:
	@export CC="$(CC)" NVCC="$(NVCC)" NCCL_FLAGS="$(NCCL_FLAGS)" NCCL_LIBS="$(NCCL_LIBS)"; \
	if sh tests/cuda/nccl.sh --probe; then sh tests/run.sh cuda_nccl sh tests/cuda/nccl.sh; \
	else sh tests/run.sh --skip cuda_nccl \
		'no nvcc, or no nccl.h of NCCL 2.14 or newer (NCCL_FLAGS, NCCL_LIBS)'; fi
include tests/ptx_host/ptx.mk
# Golden vectors in WebAssembly: the build of the page in float. FULL and `make check-web`
# add double, and float with threads.
WITH_WASM := $(shell command -v $(firstword $(EMCC)) >/dev/null && command -v $(NODE))
WASM_F32   = $(WASM)
WASM_F64   = $(WASM) -DSEQTX_DOUBLE
$(eval $(call library,wasm,$$(WASM_F32) -DSEQTX_NO_THREADS))
$(eval $(call library,wasm64,$$(WASM_F64) -DSEQTX_NO_THREADS))
$(eval $(call library,wasmt,$$(WASM_F32) -pthread))
# -O1: Emscripten then does not call acorn. `fetch`: its loader takes Node.js 18 and later
# for a browser.
LINK_WASM  = -O1 -I. $< $(filter %.o,$^) -o $@ -sNODERAWFS=1 -sTOTAL_STACK=4194304 \
	--extern-pre-js $(BUILD)/wasm_pre.js
# The main thread of a test blocks, so that no worker can be added: there are as many as the
# tests use, 16 or one per processor.
WASM_GROWS = -sALLOW_MEMORY_GROWTH=1
WASM_TEAM  = -pthread -sEXIT_RUNTIME=1 -sINITIAL_MEMORY=536870912 \
	-s'PTHREAD_POOL_SIZE=Math.max(16,require("os").cpus().length)'
GOLDEN     = $(filter golden_%,$(TESTS))
$(BUILD)/wasm_pre.js: | $(BUILD)
	@echo 'var fetch;' > $@
$(GOLDEN:%=$(BUILD)/test_%_wasm.js): $(BUILD)/test_%_wasm.js: test_%.c $(call LIB,wasm) \
		$(BUILD)/wasm_pre.js
	$(call say,EMCC)$(T) $(WASM_F32) $(LINK_WASM) $(WASM_GROWS)
$(GOLDEN:%=$(BUILD)/test_%_wasm64.js): $(BUILD)/test_%_wasm64.js: test_%.c $(call LIB,wasm64) \
		$(BUILD)/wasm_pre.js
	$(call say,EMCC)$(T) $(WASM_F64) $(LINK_WASM) $(WASM_GROWS)
$(GOLDEN:%=$(BUILD)/test_%_wasmt.js): $(BUILD)/test_%_wasmt.js: test_%.c $(call LIB,wasmt) \
		$(BUILD)/wasm_pre.js
	$(call say,EMCC)$(T) $(WASM_F32) $(LINK_WASM) $(WASM_TEAM)
GOLDEN_WEB = $(foreach p,wasm64 wasmt,$(GOLDEN:%=%_$(p)))
ifneq ($(WITH_WASM),)
$(foreach t,$(GOLDEN:%=%_wasm) $(if $(FULL),$(GOLDEN_WEB)),\
	$(call RUN,$(t),$(BUILD)/test_$(t).js,$(NODE) $(BUILD)/test_$(t).js))
else
RUNS += golden_wasm
run-golden_wasm:
	@sh tests/run.sh --skip golden_wasm 'no emcc or no node'
endif
# The page in a browser, and what is not in `make test`.
check-web: web $(GOLDEN_WEB:%=$(BUILD)/test_%.js)
	@for t in $(GOLDEN_WEB); do sh tests/run.sh $$t $(NODE) $(BUILD)/test_$$t.js; done
	@sh tests/run.sh page $(NODE) tests/web/browser.js $(WEB)/seqtx.html $(BUILD)
	@sh tests/run.sh --sum --quick $(GOLDEN_WEB) page
RUNS += arm
run-arm:
	@if sh tests/build/arm.sh --probe; then sh tests/run.sh arm sh tests/build/arm.sh; \
	else sh tests/run.sh --skip arm 'no aarch64-linux-gnu-gcc, or no qemu-aarch64'; fi
RUNS += $(if $(FULL),platforms)
run-platforms:
	@if sh tests/build/platforms.sh --probe; then \
		sh tests/run.sh platforms sh tests/build/platforms.sh; \
	else sh tests/run.sh --skip platforms 'no clang, MinGW, zig or riscv64-linux-gnu-gcc'; fi
RUNS += convert
run-convert: $(TRAINERS)
	@if sh tests/io/convert.sh --probe; then sh tests/run.sh convert sh tests/io/convert.sh; \
	else sh tests/run.sh --skip convert 'no Python with torch 1.13 or newer (PYTHON)'; fi
RUNS += python
run-python: $(TRAINERS)
	@if sh tests/python/python.sh --probe; then \
		CC="$(COMPILE)" sh tests/run.sh python sh tests/python/python.sh; \
	else sh tests/run.sh --skip python 'no Python 3.8 with numpy, venv and pip (PYTHON)'; fi
# The longest chains of work and the longest runs start first, so that none is alone at the
# end. (cuda_model: the kernels compile for a minute.)
FIRST = $(filter cuda_nvcc% ptx%,$(RUNS)) $(filter cuda_nccl,$(RUNS)) $(filter cuda_%_san,$(RUNS)) \
	cuda_model $(filter group%,$(RUNS)) form package readme flags parts cuda_attention arm cuda_ops \
	python trainer trainer_compressive trainer_sru trainer_par api_san portability embed \
	cuda_sru cuda_group bf16_attention $(filter cuda_%,$(RUNS)) $(filter %_san,$(RUNS)) \
	$(TSAN) distributed grad_f64
PTX_RUNS = $(filter ptx%,$(RUNS))
run-test-ptx-all: $(PTX_RUNS:%=run-%)
run-test run-test-all: $(FIRST:%=run-%) $(RUNS:%=run-%)
run-quick: $(QUICK:%=run-%)
# builds the programs of all tests without running them
programs: $(sort $(PROGRAMS))
.PHONY: run-test run-test-all run-test-ptx-all run-quick programs $(RUNS:%=run-%)

# one job per core, unless -j is given
CORES = $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)
LANES = $(if $(findstring -j,$(MAKEFLAGS)),,-j$(CORES))
define run_and_sum
	@rm -rf $(BUILD)/ran; mkdir -p $(BUILD)/ran; date +%s > $(BUILD)/ran/began
	+@$(MAKE) --no-print-directory $(LANES) T='sh tests/run.sh --time' run-$@ || \
		echo "make: the build is incomplete, see above"; \
	sh tests/run.sh --sum $(1)
endef
check: test
test test-all:
	$(call run_and_sum,$(RUNS))
test-ptx-all:
	$(call run_and_sum,--quick $(PTX_RUNS))
quick:
	$(call run_and_sum,--quick $(QUICK))
