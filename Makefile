# seqtx: header-only; this builds the examples and the tests.
#
#   make demo [DATA=FILE]   train a small model on real text, about two minutes on two cores; leaves build/demo.safetensors
#   make demo-sru           the same with SRU++; leaves build/demo_sru.safetensors
#   make demo-compressive   the same with the Compressive Transformer; leaves build/demo_compressive.safetensors
#   make demo-par           searches an order of attention and feed-forward blocks (PAR), then trains what it found; build/demo_par.svg shows it
#   make test               build and run every test, as much at once as there are cores; ends with "N passed, N failed"
#   make quick              what one runs while working: float and double, no sanitizers, no CUDA; about a minute from a clean clone
#   make examples           build/train_attn_span, build/train_sru, build/train_compressive, build/train_par, build/plot, build/cuts, build/hello,
#                           build/remember, build/own_family
#   make shared             build/libseqtx.so (.dylib, .dll): all headers and examples/text.h, for other languages (examples/ctypes_demo.py)
#   make install            headers, seqtx.pc and a CMake package below PREFIX (/usr/local), with DESTDIR before it; make uninstall
#   make bench              timings, against CBLAS and PyTorch where they are installed
#   make cuda CUDA_ARCH=sm_90         build/cuda: the same programs with CUDA (several: CUDA_ARCH="sm_80 sm_90"; sm_80 and newer)
#   make cuda CUDA_ARCH=sm_90 NCCL=1  .. for groups of GPUs, one a process (NCCL 2.14 or newer; NCCL_FLAGS and NCCL_LIBS where it is not in the usual
#                           places: -I.., -L.. -lnccl); check-cuda as well
#   make check-cuda CUDA_ARCH=sm_90   the tests of the GPU's side on a GPU, also under compute-sanitizer where there is one
#   make bench-cuda CUDA_ARCH=sm_90   timings on a GPU against PyTorch
#
# Set CC, CXX, ARCH (-march=native, say: the fast paths do not need it), THREADS=-DSEQTX_NO_THREADS (to build without threads), CBLAS=1 (to link a CBLAS:
# OpenBLAS, on macOS Accelerate, or CBLAS_LIBS),
# ONEDNN=1 (oneDNN; ONEDNN_FLAGS and ONEDNN_LIBS where it is not in the usual places: -I.., -L.. -ldnnl),
# SENTENCEPIECE=1 (the trainers cut text by SentencePiece models, --tokens spm, and there is build/spm_train; SENTENCEPIECE_LIBS).
# MPI=1 (trainers that train together as the ranks of `mpirun -np N`, docs/distributed.md; MPICC where it is not mpicc),
# For GNU make 3.81 (macOS) or newer. On Windows in a shell of MSYS2's; from elsewhere, make CC=x86_64-w64-mingw32-gcc examples.

CC      = cc
CXX     = c++
NVCC    = nvcc
ARCH    =
WARN    = -Wall -Wextra -Wpedantic -Wshadow -Werror
CFLAGS  = -std=c99 -O3 $(ARCH) $(WARN) $(ALIGN)
# for which system CC compiles; macOS has threads in its C library, Windows (MinGW) in its own, and there gcc's vector code needs ALIGN (seqtx.h, >>loops)
TARGET := $(shell $(CC) -dumpmachine 2>/dev/null)
DARWIN := $(findstring darwin,$(TARGET))$(findstring macos,$(TARGET))
ALIGN   =
WINDOWS := $(findstring mingw,$(TARGET))$(findstring windows-gnu,$(TARGET))
THREADS = $(if $(DARWIN)$(WINDOWS),,-pthread)
ifneq ($(WINDOWS),)
ALIGN  := $(shell echo 'int stx;' | $(CC) -Wa,-muse-unaligned-vector-move -x c -c - -o /dev/null 2>/dev/null && echo -Wa,-muse-unaligned-vector-move)
endif
ifdef CBLAS
CFLAGS += -DSEQTX_CBLAS$(if $(CBLAS_LIBS),=2)
LDLIBS += $(or $(CBLAS_LIBS),$(if $(DARWIN),-framework Accelerate,-lopenblas))
endif
ifdef ONEDNN
CFLAGS += -DSEQTX_ONEDNN -fopenmp $(ONEDNN_FLAGS)
LDLIBS += $(or $(ONEDNN_LIBS),-ldnnl)
endif
# Open MPI's and MPICH's mpicc take the compiler from these
export OMPI_CC  := $(CC)
export MPICH_CC := $(CC)
export OMPI_CXX := $(CXX)
MPICC   = mpicc
ifdef MPI
override CC := $(MPICC)
CFLAGS += -DSEQTX_MPI
endif
ifdef SENTENCEPIECE
CFLAGS += -DSEQTX_SENTENCEPIECE
LDLIBS += $(or $(SENTENCEPIECE_LIBS),-lsentencepiece_train -lsentencepiece) -lstdc++
SPM     = build/spm.o
endif
# -g1: lines of the code, no variables: a fifth less to compile
SAN     = -fsanitize=address,undefined -fno-sanitize-recover=all -g1 -O1

# a header to an object, a tests/test_NAME.c to its programs, an examples/train_NAME.c to a trainer: nothing here names a family,
# but for the tests of the trainers
PARTS    = $(patsubst %.h,%,$(wildcard seqtx*.h))
TRAINERS = $(patsubst examples/%.c,build/%,$(wildcard examples/train_*.c))
TOOLS    = build/hello build/own_family build/remember $(patsubst examples/%.c,build/%,$(wildcard examples/cuts.c)) $(if $(SPM),build/spm_train)
# what a file depends on the compiler writes down
DEPS     = -MMD -MP -MF $@.d -MT $@

.PHONY: all examples shared install uninstall demo demo-sru demo-compressive demo-par test quick bench cuda check-cuda bench-cuda clean FORCE
all: examples
examples: $(TRAINERS) $(TOOLS) build/plot

build:
	@mkdir -p build
# build/flags changes when the flags do, or the headers that there are, and everything is built again
FLAGS = $(PARTS) $(CC) $(CXX) $(CFLAGS) $(F64) $(THREADS) $(LDLIBS) $(SAN) $(LESS) $(GPU_F32) $(CUDA_F32) $(CXXSHIM)
build/flags: FORCE | build
	@echo '$(FLAGS)' | cmp -s - $@ || echo '$(FLAGS)' > $@
FORCE:

# >>library
# The library is compiled once for each configuration, a header to an object (from tests/inner/NAME.c where there is one). The test
# programs have declarations only and are linked with all of it; their own code is compiled at -O1. The examples include the implementation:
# where it is linked, these macros say that it has been (tests/readme.sh compiles each as its head says, in one command).
LIB   = $(patsubst %,build/lib_$(1)/%.o,$(PARTS)) $(SPM)
MACRO = SEQTX_$(shell echo '$(patsubst %,%_,$(patsubst seqtx_%,%,$(filter-out seqtx,$(notdir $(1)))))' | tr a-z A-Z)IMPLEMENTATION
define library
$(filter-out $(SPM),$(call LIB,$(1))): build/lib_$(1)/%.o: build/flags
	@mkdir -p $$(@D)
	$$(T) $(2) $$(DEPS) -I. -D$$(call MACRO,$$*) -x c -c $$(firstword $$(wildcard tests/inner/$$*.c) $$*.h) -o $$@
endef
build/spm.o: examples/spm.cpp build/flags
	$(T) $(CXX) -O2 -std=c++17 $(WARN) $(DEPS) -c $< -o $@
F32 = $(CC) $(CFLAGS) $(THREADS)
F64 = $(CC) $(CFLAGS) -O2 $(THREADS) -DSEQTX_DOUBLE
# with CUDA, for the tests of the GPU's side too: what a build without it has instead is one message, which test_api.c has in the others
# A null pointer and what lies past an object the address sanitizer sees as well, where it is read or written. A pointer alone, not used, is
# seen in the manuals' programs only, by clang's sanitizer (tests/portability.sh). Without these checks it is a third less to compile
LESS    = -fno-sanitize=null,pointer-overflow,object-size
SAN_F32 = $(CC) -std=c99 $(WARN) $(SAN) $(LESS) $(THREADS) -DTEST_AMX_EMULATED -DSEQTX_CUDA -DSEQTX_CUDA_HOST -DSEQTX_NCCL
$(eval $(call library,f32,$$(F32)))
$(eval $(call library,f64,$$(F64)))
$(eval $(call library,san,$$(SAN_F32)))
$(eval $(call library,plain,$$(filter-out -DSEQTX_CBLAS,$$(F32))))
# (a new file of tests/inner: the .d files do not know it yet)
$(foreach l,f32 f64 san plain cuda,$(foreach p,$(wildcard tests/inner/*.c),$(eval build/lib_$(l)/$(p:tests/inner/%.c=%).o: $(p))))
DONE = $(foreach p,$(PARTS),-D$(call MACRO,$(p))_DONE) -DSTX_LOOPS_DONE

# objects of the headers that a program of examples/ includes
USED = build/lib_$(1)/seqtx.o $(patsubst %,build/lib_$(1)/%.o,$(shell sed -n 's|^.include "\(\.\./\)\{0,1\}\(seqtx_[a-z_]*\)\.h".*|\2|p' $(2))) $(SPM)
$(foreach t,$(TRAINERS) $(TOOLS),$(eval $(t): $(call USED,f32,$(t:build/%=examples/%.c))))
$(TRAINERS) $(TOOLS): build/%: examples/%.c
	$(T) $(F32) $(DONE) $(DEPS) -I. $< $(filter %.o,$^) -o $@ -lm $(LDLIBS)

# the trainers as ranks, and a test in double, where there is an mpicc: the core is compiled with MPI, all else is the same
WITH_MPI := $(shell command -v $(MPICC) 2>/dev/null)
build/lib_mpi/seqtx.o build/lib_mpi64/seqtx.o: seqtx.h build/flags
	@mkdir -p $(@D)
	$(T) $(MPICC) $(CFLAGS) $(THREADS) $(if $(findstring 64,$@),-O2 -DSEQTX_DOUBLE) -DSEQTX_MPI $(DEPS) -I. -DSEQTX_IMPLEMENTATION -x c -c $< -o $@
MPI_TRAINERS = $(TRAINERS:build/%=build/mpi/%)
$(foreach t,$(TRAINERS),$(eval $(t:build/%=build/mpi/%): build/lib_mpi/seqtx.o $(filter-out %/seqtx.o,$(call USED,f32,$(t:build/%=examples/%.c)))))
$(MPI_TRAINERS): build/mpi/%: examples/%.c
	@mkdir -p $(@D)
	$(T) $(MPICC) $(CFLAGS) $(THREADS) $(DONE) $(DEPS) $< $(filter %.o,$^) -o $@ -lm $(LDLIBS)
build/test_group: tests/test_group.c build/lib_mpi64/seqtx.o $(filter-out %/seqtx.o,$(call LIB,f64))
	$(T) $(MPICC) $(CFLAGS) $(THREADS) -O1 -DSEQTX_DOUBLE $(DEPS) $< $(filter %.o,$^) -o $@ -lm $(LDLIBS)

# of the library it has the version's number alone
build/plot: examples/plot.c build/flags
	$(T) $(CC) $(CFLAGS) -O2 $(DEPS) $< -o $@ -lm

ifndef SENTENCEPIECE
build/spm_train:
	@echo "spm_train is SentencePiece's: make SENTENCEPIECE=1 $@ (Debian: libsentencepiece-dev)" >&2; exit 2
endif

# >>shared: what each header exports, and nothing else
EXPORT = $(if $(WINDOWS),-DSEQTX_API='__declspec(dllexport)',-fPIC -fvisibility=hidden -DSEQTX_API='__attribute__((visibility("default")))')
SHARED = build/libseqtx.$(if $(DARWIN),dylib,$(if $(WINDOWS),dll,so))
$(PARTS:%=build/shared/%.o): build/shared/%.o: %.h build/flags
	@mkdir -p $(@D)
	$(T) $(F32) $(EXPORT) $(DEPS) -I. -D$(call MACRO,$*) -x c -c $< -o $@
$(SHARED): $(PARTS:%=build/shared/%.o)
	$(T) $(CC) $(if $(DARWIN),-dynamiclib -install_name @rpath/$(@F),-shared) $(THREADS) $^ -o $@ -lm $(filter-out -lstdc++ -lsentencepiece%,$(LDLIBS))
shared: $(SHARED)

# >>install: headers only, there is nothing to compile
PREFIX  = /usr/local
DESTDIR =
VERSION = $(shell sed -n 's/^.define STX_VERSION  *"\(.*\)"/\1/p' seqtx.h)
INTO    = $(DESTDIR)$(PREFIX)
install:
	@case "$(PREFIX)" in /*) ;; *) echo "PREFIX=$(PREFIX): want a directory from the root on, as in PREFIX=$$PWD/there" >&2; exit 2 ;; esac
	install -d "$(INTO)/include/seqtx" "$(INTO)/share/pkgconfig" "$(INTO)/share/cmake/seqtx" "$(INTO)/share/doc/seqtx"
	install -m 644 $(wildcard seqtx*.h) seqtx_cuda.cu "$(INTO)/include/seqtx"
	sed 's|@VERSION@|$(VERSION)|' package/seqtx.pc.in > "$(INTO)/share/pkgconfig/seqtx.pc"
	sed 's|@VERSION@|$(VERSION)|' package/seqtx-config-version.cmake.in > "$(INTO)/share/cmake/seqtx/seqtx-config-version.cmake"
	install -m 644 package/seqtx-config.cmake "$(INTO)/share/cmake/seqtx"
	install -m 644 LICENSE "$(INTO)/share/doc/seqtx"
uninstall:
	for f in $(wildcard seqtx*.h) seqtx_cuda.cu; do rm -f "$(INTO)/include/seqtx/$$f"; done
	rm -f "$(INTO)/share/cmake/seqtx/seqtx-config.cmake" "$(INTO)/share/cmake/seqtx/seqtx-config-version.cmake" "$(INTO)/share/doc/seqtx/LICENSE" "$(INTO)/share/pkgconfig/seqtx.pc"
	for d in include/seqtx share/cmake/seqtx share/doc/seqtx; do rmdir "$(INTO)/$$d" 2>/dev/null || true; done

# >>demo    DEMO: more options of the trainer, as in: make demo DEMO="--steps 200"
build/demo.txt: examples/demo_data.sh | build
	sh examples/demo_data.sh $@
DATA = build/demo.txt
demo: build/train_attn_span $(DATA)
	@rm -f build/demo.safetensors build/demo.jsonl
	build/train_attn_span --preset demo --data $(DATA) --checkpoint build/demo.safetensors --log build/demo.jsonl --generate 500 --prompt "#ifndef _" $(DEMO)
	@sh examples/demo_compare.sh build/demo.jsonl $(DATA)

demo-sru: build/train_sru $(DATA)
	@rm -f build/demo_sru.safetensors build/demo_sru.jsonl
	build/train_sru --preset demo --data $(DATA) --checkpoint build/demo_sru.safetensors --log build/demo_sru.jsonl --generate 500 --prompt "#ifndef _" $(DEMO)
	@sh examples/demo_compare.sh build/demo_sru.jsonl $(DATA)

demo-compressive: build/train_compressive $(DATA)
	@rm -f build/demo_compressive.safetensors build/demo_compressive.jsonl
	build/train_compressive --preset demo --data $(DATA) --checkpoint build/demo_compressive.safetensors --log build/demo_compressive.jsonl --generate 500 --prompt "#ifndef _" $(DEMO)
	@sh examples/demo_compare.sh build/demo_compressive.jsonl $(DATA)

demo-par: build/train_par $(DATA)
	@rm -f build/demo_par.safetensors build/demo_par.jsonl build/demo_par_search.safetensors build/demo_par_search.jsonl
	build/train_par --preset demo --data $(DATA) --checkpoint build/demo_par_search.safetensors --log build/demo_par_search.jsonl --picture build/demo_par.svg $(DEMO)
	build/train_par --checkpoint build/demo_par_search.safetensors --derive --derive-samples 4 > build/demo_par.found
	@cat build/demo_par.found
	build/train_par --preset demo-found --pattern "$$(sed -n 's/^best: \([^:]*\):.*/\1/p' build/demo_par.found)" --inherit build/demo_par_search.safetensors --data $(DATA) \
		--checkpoint build/demo_par.safetensors --log build/demo_par.jsonl --race xl --generate 500 --prompt "#ifndef _" $(DEMO)
	@sh examples/demo_compare.sh build/demo_par.jsonl $(DATA)

# >>tests: each program prints "N passed, N failed"; tests/run.sh runs one and adds all up
# tests/test_NAME.c: all that are not named here are run in float, in double, and with sanitizers
ALL        = $(patsubst tests/test_%.c,%,$(wildcard tests/test_*.c))
ONLY       = grad train_h onednn flags group $(filter cuda_%,$(ALL))
TESTS      = $(filter-out $(ONLY),$(ALL))
TESTS_F64  = grad $(filter-out io,$(TESTS))
TESTS_SAN  = $(TESTS)
TESTS_CUDA = $(patsubst cuda_%,%,$(filter cuda_%,$(ALL))) $(filter golden_%,$(ALL))
CUDA_SAN   = $(filter-out model golden_%,$(TESTS_CUDA))
# an argument for those that know it: less repetition where the code is slow and its threads and memory are the same
SHORT      = $(if $(shell grep -l '"short"' tests/test_$(1).c),short)

$(filter-out build/test_bf16,$(TESTS:%=build/test_%)): build/test_%: tests/test_%.c $(call LIB,f32)
	$(T) $(F32) -O1 $(DEPS) $< $(filter %.o,$^) -o $@ -lm $(LDLIBS)
# its products are those of the library, whatever CBLAS the others are linked with
build/test_bf16: tests/test_bf16.c $(call LIB,$(if $(CBLAS),plain,f32))
	$(T) $(F32) -O1 $(DEPS) $< $(filter %.o,$^) -o $@ -lm $(LDLIBS)
$(TESTS_F64:%=build/test_%_f64): build/test_%_f64: tests/test_%.c $(call LIB,f64)
	$(T) $(F64) -O1 $(DEPS) $< $(filter %.o,$^) -o $@ -lm $(LDLIBS)
SHIM_SAN = $(call LIB,san) build/cuda_kernels_san.o build/cuda_host_san.o
ALL_SAN  = $(TESTS_SAN) $(CUDA_SAN:%=cuda_%)
$(ALL_SAN:%=build/test_%_san.o): build/test_%_san.o: tests/test_%.c build/flags
	$(T) $(SAN_F32) $(DEPS) -c $< -o $@
$(ALL_SAN:%=build/test_%_san): build/test_%_san: build/test_%_san.o $(SHIM_SAN)
	$(CXX) $(SAN) $^ -o $@ -lm -lpthread
build/fuzz_io_san.o: tests/fuzz_io.c build/flags
	$(T) $(SAN_F32) $(DEPS) -c $< -o $@
build/fuzz_io_san: build/fuzz_io_san.o $(SHIM_SAN)
	$(CXX) $(SAN) $^ -o $@ -lm -lpthread
TSAN := $(shell echo 'int main(void){return 0;}' | $(CC) -fsanitize=thread -x c - -o /dev/null 2>/dev/null && echo threads_tsan)
build/test_threads_tsan: tests/test_threads.c build/flags
	$(T) $(CC) -std=c99 $(WARN) -Wno-unused-function -O1 -g1 -fsanitize=thread -DTEST_TSAN -DSEQTX_STATIC -DSEQTX_IMPLEMENTATION $(THREADS) $(DEPS) $< -o $@ -lm
build/test_train_h: tests/test_train_h.c build/flags
	$(T) $(CC) $(CFLAGS) $(DEPS) $< -o $@ -lm

# >>cuda on the host: seqtx_cuda.cu by the host's compiler (tests/cuda_host), so that every kernel runs where there is no GPU
CXXHOST = $(CXX) -std=c++17 $(WARN) -Itests/cuda_host
# fmaf as an instruction where the processor has it: in the library it is a call, and most of what kernels do
FMA    := $(shell grep -qm 1 '^flags.* fma ' /proc/cpuinfo 2>/dev/null && echo -mfma -ffp-contract=off)
CXXSHIM = $(CXXHOST) $(FMA) -Wno-unused-function -Wno-unknown-pragmas -Wno-maybe-uninitialized -DSEQTX_CUDA -DSEQTX_CUDA_HOST -DSEQTX_NCCL
STACK  := $(shell printf 'int main(void){return 0;}' | $(CXX) --param asan-stack=0 -x c++ - -o /dev/null 2>/dev/null && echo --param asan-stack=0 || echo -mllvm -asan-stack=0)
CUDA_F32 = $(CC) $(CFLAGS) -DSEQTX_CUDA -DSEQTX_CUDA_HOST -DSEQTX_NCCL
# -O1, as the kernels: what the tests do on the CPU beside them is little
$(eval $(call library,cuda,$$(CUDA_F32) -O1))
SHIM     = $(call LIB,cuda) build/cuda_kernels.o build/cuda_host.o
build/cuda_host.o: tests/cuda_host/cuda_host.cpp build/flags
	$(T) $(CXXHOST) $(FMA) -O3 $(DEPS) -c $< -o $@
# -O1: most of the time of what runs on it goes to the fibers, which are in cuda_host.o
build/cuda_kernels.o: tests/inner/seqtx_cuda.cu build/flags
	$(T) $(CXXSHIM) -O1 $(DEPS) -x c++ -c $< -o $@
build/cuda_host_san.o: tests/cuda_host/cuda_host.cpp build/flags
	$(T) $(CXXHOST) $(FMA) -O3 -DCUDA_HOST_ASAN $(DEPS) -c $< -o $@
# of -fsanitize=undefined alignment alone: with shift and overflow these templates take a quarter longer to compile, with all three times as long
build/cuda_kernels_san.o: tests/inner/seqtx_cuda.cu build/flags
	$(T) $(CXXSHIM) -fsanitize=address,alignment -fno-sanitize-recover=all -O1 $(STACK) $(DEPS) -x c++ -c $< -o $@

CUDA_NEW = $(filter-out golden_%,$(TESTS_CUDA))
$(CUDA_NEW:%=build/test_cuda_%.o): build/test_cuda_%.o: tests/test_cuda_%.c build/flags
	$(T) $(CUDA_F32) -O1 $(DEPS) -c $< -o $@
$(patsubst %,build/test_cuda_%.o,$(filter golden_%,$(TESTS_CUDA))): build/test_cuda_%.o: tests/test_%.c build/flags
	$(T) $(CUDA_F32) -O1 $(DEPS) -DGOLDEN_DEVICE=STX_CUDA -c $< -o $@
$(TESTS_CUDA:%=build/test_cuda_%): build/test_cuda_%: build/test_cuda_%.o $(SHIM)
	$(CXX) $^ -o $@ -lm -lpthread $(LDLIBS)
build/test_shim: tests/cuda_host/test_shim.cpp build/cuda_host.o build/lib_$(if $(CBLAS),plain,f32)/seqtx.o build/flags
	$(T) $(CXXHOST) -Wno-unknown-pragmas -O0 $(DEPS) $< $(filter %.o,$^) -o $@ -lm -lpthread $(LDLIBS)
build/test_shim_san: tests/cuda_host/test_shim.cpp $(SHIM_SAN) build/flags
	$(T) $(CXXHOST) -Wno-unknown-pragmas $(SAN) $(LESS) -O0 $(STACK) $(DEPS) $< $(filter %.o,$^) -o $@ -lm -lpthread
# the trainers on it
$(TRAINERS:%=%_shim.o): build/%_shim.o: examples/%.c build/flags
	$(T) $(CUDA_F32) -O1 $(DONE) $(DEPS) -c $< -o $@
$(TRAINERS:%=%_shim): %_shim: %_shim.o $(SHIM)
	$(CXX) $^ -o $@ -lm -lpthread $(LDLIBS)

# >>runs: what `make test` runs. run-NAME needs PROGRAMS and runs COMMAND
define run
RUNS += $(1)
PROGRAMS += $(2)
run-$(1): $(2)
	@CC="$(CC)" CXX="$(CXX)" NVCC="$(NVCC)" ONEDNN_FLAGS="$(ONEDNN_FLAGS)" ONEDNN_LIBS="$(ONEDNN_LIBS)" sh tests/run.sh $(1) $(3)
endef
RUN = $(eval $(call run,$(1),$(2),$(3)))
$(foreach t,$(filter-out bf16,$(TESTS)),$(call RUN,$(t),build/test_$(t),build/test_$(t)))
# in two, for `make quick` has the first
BF16_LONG = attention attention_cut attention_borders
$(call RUN,bf16,build/test_bf16,build/test_bf16 but $(BF16_LONG))
$(call RUN,bf16_attention,build/test_bf16,build/test_bf16 $(BF16_LONG))
$(call RUN,train_h,build/test_train_h,build/test_train_h)
$(foreach t,$(TESTS_F64),$(call RUN,$(t)_f64,build/test_$(t)_f64,build/test_$(t)_f64 $(call SHORT,$(t))))
QUICK := $(filter-out bf16_attention api_f64 comp_f64 span_f64 threads_f64,$(RUNS))
$(foreach t,$(TESTS_SAN),$(call RUN,$(t)_san,build/test_$(t)_san,build/test_$(t)_san $(call SHORT,$(t))))
$(foreach t,$(TSAN),$(call RUN,$(t),build/test_$(t),build/test_$(t) short))
$(call RUN,fuzz_io_san,build/fuzz_io_san,build/fuzz_io_san)
$(call RUN,cuda_host,build/test_shim,build/test_shim)
$(foreach t,$(TESTS_CUDA),$(call RUN,cuda_$(t),build/test_cuda_$(t),build/test_cuda_$(t)))
$(call RUN,cuda_host_san,build/test_shim_san,build/test_shim_san)
$(foreach t,$(CUDA_SAN),$(call RUN,cuda_$(t)_san,build/test_cuda_$(t)_san,build/test_cuda_$(t)_san short))
$(call RUN,cuda_trainer,build/train_attn_span_shim,sh tests/trainer_cuda.sh attn_span build/train_attn_span_shim)
$(call RUN,cuda_trainer_sru,build/train_sru_shim,sh tests/trainer_cuda.sh sru build/train_sru_shim)
$(call RUN,cuda_trainer_compressive,build/train_compressive_shim,sh tests/trainer_cuda.sh compressive build/train_compressive_shim)
$(call RUN,trainer_par,build/train_par build/cuts $(if $(SPM),build/spm_train),sh tests/trainer.sh par build/train_par)
$(call RUN,cuda_trainer_par,build/train_par_shim,sh tests/trainer_cuda.sh par build/train_par_shim)
$(call RUN,trainer,build/train_attn_span,sh tests/trainer.sh attn_span build/train_attn_span)
$(call RUN,trainer_sru,build/train_sru,sh tests/trainer.sh sru build/train_sru)
$(call RUN,trainer_compressive,build/train_compressive,sh tests/trainer.sh compressive build/train_compressive)
$(call RUN,plot,build/plot,sh tests/plot.sh)
$(call RUN,readme,examples,sh tests/readme.sh)
$(call RUN,form,,sh tests/form.sh)
$(call RUN,flags,,sh tests/flags.sh)
$(call RUN,portability,,sh tests/portability.sh)
$(call RUN,embed,,sh tests/embed.sh)
$(call RUN,names,,sh tests/names.sh)
$(call RUN,cookbook,build/train_attn_span build/plot $(call LIB,f32) $(call LIB,f64),env LDLIBS="$(abspath $(SPM)) $(LDLIBS)" sh tests/cookbook.sh)
$(call RUN,cuda_make,,sh tests/cuda_make.sh)
ifneq ($(shell command -v $(NVCC) 2>/dev/null),)
$(call RUN,cuda_nvcc,,sh tests/cuda_regs.sh --shared sm_80 sm_90)
else
RUNS += cuda_nvcc
run-cuda_nvcc:
	@sh tests/run.sh --skip cuda_nvcc 'no nvcc'
endif
ifneq ($(WITH_MPI),)
$(call RUN,group,build/test_group,sh tests/group.sh --core build/test_group)
$(call RUN,distributed,build/mpi/train_attn_span,env MPICC="$(MPICC)" LDLIBS="$(abspath $(SPM)) $(LDLIBS)" sh tests/distributed.sh)
$(foreach t,$(TRAINERS:build/train_%=%),$(call RUN,group_$(t),build/mpi/train_$(t) build/train_$(t),sh tests/group.sh $(t) build/mpi/train_$(t) build/train_$(t)))
else
RUNS += group distributed
run-group run-distributed:
	@sh tests/run.sh --skip $(@:run-%=%) 'no mpicc'
endif
RUNS += cuda_nccl
run-cuda_nccl:
	@export CC="$(CC)" NVCC="$(NVCC)" NCCL_FLAGS="$(NCCL_FLAGS)" NCCL_LIBS="$(NCCL_LIBS)"; \
	if sh tests/nccl.sh --probe; then sh tests/run.sh cuda_nccl sh tests/nccl.sh; \
	else sh tests/run.sh --skip cuda_nccl 'no nvcc, or no nccl.h of NCCL 2.14 or newer (NCCL_FLAGS, NCCL_LIBS)'; fi
RUNS += arm
run-arm:
	@if sh tests/arm.sh --probe; then sh tests/run.sh arm sh tests/arm.sh; \
	else sh tests/run.sh --skip arm 'no aarch64-linux-gnu-gcc, or no qemu-aarch64'; fi
RUNS += platforms
run-platforms:
	@if sh tests/platforms.sh --probe; then sh tests/run.sh platforms sh tests/platforms.sh; \
	else sh tests/run.sh --skip platforms 'no clang, MinGW, zig or riscv64-linux-gnu-gcc'; fi
RUNS += convert
run-convert: $(TRAINERS)
	@if sh tests/convert.sh --probe; then sh tests/run.sh convert sh tests/convert.sh; \
	else sh tests/run.sh --skip convert 'no Python with torch 1.13 or newer (PYTHON)'; fi
RUNS += onednn
run-onednn:
	@export CC="$(CC)" CXX="$(CXX)" ONEDNN_FLAGS="$(ONEDNN_FLAGS)" ONEDNN_LIBS="$(ONEDNN_LIBS)"; \
	if sh tests/onednn.sh --probe; then sh tests/run.sh onednn sh tests/onednn.sh; \
	else sh tests/run.sh --skip onednn 'no dnnl.h, or no libdnnl (ONEDNN_FLAGS, ONEDNN_LIBS)'; fi
# in the order of the longest chains of work; the rest follows
FIRST = $(filter cuda_nvcc%,$(RUNS)) cuda_nccl $(filter cuda_%_san,$(RUNS)) $(filter cuda_%,$(RUNS)) bf16_san fuzz_io_san form flags \
	trainer trainer_sru trainer_compressive trainer_par readme $(filter %_san,$(RUNS)) grad_f64
run-test: $(FIRST:%=run-%) $(RUNS:%=run-%)
run-quick: $(QUICK:%=run-%)
# what they need, without running anything
programs: $(sort $(PROGRAMS))
.PHONY: run-test run-quick programs $(RUNS:%=run-%)

# as many at once as there are cores, unless -j says otherwise
LANES = $(if $(findstring -j,$(MAKEFLAGS)),,-j$(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2))
define run_and_sum
	@rm -rf build/ran; mkdir -p build/ran; date +%s > build/ran/began
	+@$(MAKE) --no-print-directory $(LANES) T='sh tests/run.sh --time' run-$@ || echo "make: not all was built, see above"; \
	sh tests/run.sh --sum $(1)
endef
test:
	$(call run_and_sum,$(RUNS))
quick:
	$(call run_and_sum,--quick $(QUICK))

# >>cuda: seqtx_cuda.cu by nvcc, the rest by the C compiler
CUDA_ARCH =
CUDA_DIR := $(shell sh tests/cuda_dir.sh "$(NVCC)")
# The programs find the libraries where they were linked: not every machine has them in ld.so.conf.
COMMA    := ,
RPATH     = $(patsubst -L%,-Wl$(COMMA)-rpath$(COMMA)%,$(filter -L%,$(1)))
CUDA_LIBS = -L$(CUDA_DIR)/lib64 $(call RPATH,-L$(CUDA_DIR)/lib64 $(if $(NCCL),$(NCCL_LIBS))) \
	$(if $(NCCL),$(or $(NCCL_LIBS),-lnccl)) -lcublasLt -lcudart -lstdc++ -lm
CUDA_NCCL = $(if $(NCCL),-DSEQTX_NCCL $(NCCL_FLAGS))
CUDA_TESTS = $(TESTS_CUDA:%=build/cuda/test_cuda_%)
GENCODE = $(foreach a,$(patsubst sm_%,%,$(CUDA_ARCH)),-gencode arch=compute_$(a),code=sm_$(a))
build/cuda:
	@mkdir -p build/cuda
build/cuda/arch: FORCE | build/cuda
	@sh tests/cuda_arch.sh "$(NVCC)" $(CUDA_ARCH)
	@echo '$(NVCC) $(CUDA_ARCH) $(CUDA_NCCL) $(CUDA_LIBS)' | cmp -s - $@ || echo '$(NVCC) $(CUDA_ARCH) $(CUDA_NCCL) $(CUDA_LIBS)' > $@
build/cuda/seqtx_cuda.o: tests/inner/seqtx_cuda.cu tests/inner.h seqtx_cuda.cu $(PARTS:%=%.h) build/cuda/arch
	$(NVCC) -O3 -std=c++17 $(GENCODE) $(CUDA_NCCL) -Xcompiler -Wall,-Wextra -c $< -o $@
GPU_F32 = $(F32) -DSEQTX_CUDA $(if $(NCCL),-DSEQTX_NCCL)
$(eval $(call library,gpu,$$(GPU_F32)))
$(foreach t,$(TRAINERS),$(eval $(t:build/%=build/cuda/%): $(call USED,gpu,$(t:build/%=examples/%.c))))
$(TRAINERS:build/%=build/cuda/%): build/cuda/%: examples/%.c build/cuda/seqtx_cuda.o
	$(GPU_F32) $(DONE) $(DEPS) $< $(filter %.o,$^) -o $@ $(CUDA_LIBS) $(LDLIBS)
$(CUDA_NEW:%=build/cuda/test_cuda_%): build/cuda/test_cuda_%: tests/test_cuda_%.c build/cuda/seqtx_cuda.o $(call LIB,gpu)
	$(GPU_F32) -O1 $(DEPS) $^ -o $@ $(CUDA_LIBS) $(LDLIBS)
$(patsubst %,build/cuda/test_cuda_%,$(filter golden_%,$(TESTS_CUDA))): build/cuda/test_cuda_%: tests/test_%.c build/cuda/seqtx_cuda.o $(call LIB,gpu)
	$(GPU_F32) -O1 -DGOLDEN_DEVICE=STX_CUDA $(DEPS) $^ -o $@ $(CUDA_LIBS) $(LDLIBS)
build/cuda/bench_cuda: bench/bench_cuda.c bench/cuda_model.h bench/report.h $(PARTS:%=%.h) build/flags build/cuda/seqtx_cuda.o
	$(GPU_F32) -isystem $(CUDA_DIR)/include $< build/cuda/seqtx_cuda.o -o $@ $(CUDA_LIBS) $(LDLIBS)
build/bench_cuda_host: bench/bench_cuda.c bench/cuda_model.h bench/report.h build/cuda_kernels.o build/cuda_host.o build/flags
	$(CUDA_F32) $(DEPS) -c $< -o $@.o
	$(CXX) $@.o build/cuda_kernels.o build/cuda_host.o -o $@ -lm -lpthread $(LDLIBS)
cuda: $(TRAINERS:build/%=build/cuda/%)
check-cuda: cuda $(CUDA_TESTS)
	@sh tests/check_cuda.sh $(TESTS_CUDA)
bench-cuda: build/cuda/bench_cuda
	sh bench/run_cuda.sh $(BENCH)

bench:
	CC="$(CC)" sh bench/run.sh $(BENCH)

-include $(wildcard build/*.d build/*/*.d build/*/*/*.d)
# a source file that is gone, and was in those: what was made of it is made again of what there is now (headers have -MP)
%.c: ;
%.cu: ;
%.cpp: ;

clean:
	rm -rf build
