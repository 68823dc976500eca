# seqtx is header-only. This Makefile builds the examples, the tests and a library for
# other languages. tests/tests.mk has the rules for the tests.
#
#   make help            prints this text
#   make                 examples, shared, static, man: all that `make install` installs
#   make examples        build/train_attn_span, train_sru, train_compressive, train_par,
#                        plot, cuts, hello, generate, remember, pack, attention_map,
#                        own_family, own_compression, own_block
#   make demo            trains a small model on the English of this repository for two
#                        minutes; writes build/demo.safetensors. DATA=FILE: another text
#   make demo-sru, make demo-compressive     the same for other families
#   make demo-par        searches an order of attention and feed-forward blocks (PAR) and
#                        trains the result; build/demo_par.svg shows the search
#   make test            builds and runs the tests; ends with "N passed, N failed"
#   make test-all        the same tests with more compilers, options and sanitizers
#   make test-ptx-all    the CUDA tests by the PTX that nvcc generates, for all architectures;
#                        needs nvcc, but no GPU
#   make quick           tests in float and double, without sanitizers and CUDA
#   make single          writes seqtx.h and seqtx_cuda.cu from their parts in src/
#   make web             build/web/seqtx.html: trains and shows models in a browser
#                        (docs/web.md); needs Emscripten and Node.js
#   make check-web       tests this page in Chromium
#   make shared static   build/libseqtx.so (.dylib, .dll), build/libseqtx.a: all headers
#   make install         programs, library, headers, manual pages, seqtx.pc, CMake package
#   make install-headers    headers, seqtx.pc and CMake package
#   make uninstall       removes all of these
#   make bench           benchmarks, against CBLAS and PyTorch if they are installed
#   make cuda CUDA_ARCH=sm_90           the programs with CUDA in build/cuda, for sm_80 or
#                                       newer (several: CUDA_ARCH="sm_80 sm_90")
#   make cuda CUDA_ARCH=sm_90 NCCL=1    the same for groups of GPUs, one per process (NCCL
#                                       2.14 or newer)
#   make check-cuda CUDA_ARCH=sm_90     GPU tests, with compute-sanitizer if installed
#   make bench-cuda CUDA_ARCH=sm_90     GPU benchmarks against PyTorch
#
# Variables, in the environment or on the command line:
#   CC, CXX, AR, CPPFLAGS, CFLAGS, CXXFLAGS, LDFLAGS, LDLIBS    user's flags; they take
#                                  precedence
#   ARCH=-march=native             not needed for the fast paths
#   THREADS=-DSEQTX_NO_THREADS     no threads
#   CBLAS=1                        OpenBLAS, Accelerate on macOS, or CBLAS_LIBS
#   SENTENCEPIECE=1                --tokens spm, and build/spm_train (SENTENCEPIECE_LIBS)
#   MPI=1                          trainers as ranks of `mpirun -np N` (MPICC)
#   NCCL=1                         with `make cuda` (NCCL_FLAGS, NCCL_LIBS)
#   BUILD=DIR                      output directory (default: build)
#   PREFIX, DESTDIR, prefix, exec_prefix, bindir, libdir, includedir, datarootdir, mandir,
#   docdir                         installation directories
#   V=1                            prints full commands
#   DEV=1                          warnings are errors
#
# Needs GNU make 3.81 (macOS) or newer. `make -f DIR/Makefile` in another directory builds
# in build/ there. On Windows, use a shell of MSYS2. Cross-compile for Windows with make
# CC=x86_64-w64-mingw32-gcc examples.

# GNU make skips this block, because there is no such variable. BSD make prints the
# message.
ifdef GNU_MAKE_IS_NEEDED:
.error seqtx needs GNU make: gmake (on Linux and macOS: make)
endif

BUILD ?= build
ifneq ($(words $(BUILD)),1)
$(error BUILD="$(BUILD)": expected a directory whose path has no blanks)
endif
ifeq ($(wildcard seqtx.h),)
# In another directory: builds the same goals in the tree, with BUILD here.
TREE  := $(dir $(lastword $(MAKEFILE_LIST)))
ifeq ($(and $(filter 1,$(words $(CURDIR))),$(wildcard $(TREE)seqtx.h)),)
$(error `make -f DIR/Makefile` needs paths without blanks, of DIR and of the current \
	directory; in a tree with blanks in its path, run make there)
endif
HERE  := $(abspath $(BUILD))
GOALS := $(or $(MAKECMDGOALS),all)
.PHONY: in_tree $(GOALS)
$(GOALS): in_tree
	@:
in_tree:
	+@$(MAKE) --no-print-directory -C $(TREE) BUILD=$(HERE) $(GOALS:$(BUILD)/%=$(HERE)/%)
else

# No built-in rules, so that `make -B` finds no rule for the Makefile.
.DEFAULT_GOAL := all
MAKEFLAGS += -r
.SUFFIXES:
Makefile: ;

ifeq ($(origin CXX),default)
CXX     = c++
endif
NVCC   ?= nvcc
MPICC  ?= mpicc
# COMPILE: the C compiler of programs and ranks. The exports set the compiler that mpicc
# (Open MPI, MPICH) calls.
COMPILE = $(if $(MPI),$(MPICC),$(CC))
export OMPI_CC   := $(CC)
export MPICH_CC  := $(CC)
export OMPI_CXX  := $(CXX)
ifeq ($(origin AR),default)
AR     := $(if $(filter %-gcc,$(CC)),$(CC:%-gcc=%-ar),ar)
endif

# The target system. macOS and Windows (MinGW) have threads in the C library. On Windows,
# the vector code of gcc needs ALIGN (seqtx.h, >>loops).
TARGET  := $(shell $(CC) -dumpmachine 2>/dev/null)
DARWIN  := $(findstring darwin,$(TARGET))$(findstring macos,$(TARGET))
WINDOWS := $(findstring mingw,$(TARGET))$(findstring windows-gnu,$(TARGET))
ifneq ($(WINDOWS),)
ALIGN   := $(shell echo 'int stx;' | $(CC) -Wa,-muse-unaligned-vector-move -x c -c - -o /dev/null \
	2>/dev/null && echo -Wa,-muse-unaligned-vector-move)
endif
THREADS ?= $(if $(DARWIN)$(WINDOWS),,-pthread)

# Our flags. The user's flags follow ours on every command line: they take precedence and
# replace none.
WARN     = -Wall -Wextra -Wpedantic -Wshadow $(if $(DEV),-Werror)
OWN      = -std=c99 -O3 $(ARCH) $(WARN) $(ALIGN) $(FEATURES)
LIBS     = $(EXTRA) $(LDLIBS)
FEATURES =
EXTRA    =
ifdef CBLAS
FEATURES += -DSEQTX_CBLAS$(if $(CBLAS_LIBS),=2)
EXTRA    += $(or $(CBLAS_LIBS),$(if $(DARWIN),-framework Accelerate,-lopenblas))
endif
ifdef MPI
FEATURES += -DSEQTX_MPI
endif
ifdef SENTENCEPIECE
FEATURES += -DSEQTX_SENTENCEPIECE
SPM_LIBS  = $(or $(SENTENCEPIECE_LIBS),-lsentencepiece_train -lsentencepiece) -lstdc++
EXTRA    += $(SPM_LIBS)
SPM       = $(BUILD)/spm.o
endif
# $(call c,OPTIONS), $(call cxx,OPTIONS): C and C++ compiler with all flags
flags    = $(OWN) $(1) $(THREADS) $(CPPFLAGS) $(CFLAGS)
c        = $(COMPILE) $(flags)
cxx      = $(CXX) -std=c++17 $(WARN) $(1) $(CPPFLAGS) $(CXXFLAGS)
# -g1: line numbers without variables compile a fifth faster.
SAN      = -fsanitize=address,undefined -fno-sanitize-recover=all -g1 -O1

# Prints one short line per command; V=1: full commands; make -s: nothing.
SILENT  := $(findstring s,$(filter-out -%,$(firstword x$(MAKEFLAGS))))
say      = $(if $(V)$(SILENT),,@printf '  %-4s %s\n' $(1) $@;)

# Every header becomes an object, tests/*/test_NAME.c programs, examples/train_NAME.c a
# trainer. No list here names a family, except the tests of the trainers.
PARTS    = $(patsubst %.h,%,$(wildcard seqtx*.h))
TRAINERS = $(patsubst examples/%.c,$(BUILD)/%,$(wildcard examples/train_*.c))
TOOLS    = $(BUILD)/hello $(BUILD)/generate $(BUILD)/own_family $(BUILD)/own_compression \
	$(BUILD)/own_block $(BUILD)/remember $(BUILD)/pack $(BUILD)/attention_map $(BUILD)/cuts \
	$(if $(SPM),$(BUILD)/spm_train)
# The compiler writes the dependencies of each file.
DEPS     = -MMD -MP -MF $@.d -MT $@
LINK     = $(DEPS) $(LDFLAGS) $< $(filter %.o,$^) -o $@ -lm $(LIBS)

.PHONY: all examples shared static man install install-headers uninstall demo demo-sru \
	demo-compressive demo-par test test-all test-ptx-all check quick bench cuda check-cuda \
	bench-cuda clean single help web check-web FORCE
all: examples shared static man
examples: $(TRAINERS) $(TOOLS) $(BUILD)/plot
single:
	sh tools/single.sh
help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' Makefile

$(BUILD):
	@mkdir -p $@
# BUILD/flags changes with the flags and the set of headers, and then everything is
# rebuilt. -Werror does not affect objects.
FLAGS = $(filter-out -Werror,$(PARTS) $(F32) $(F64) $(LINK_SHARED) $(LDFLAGS) $(LIBS) $(SAN) \
	$(LESS) $(GPU_F32) $(CUDA_F32) $(call shim))
$(BUILD)/flags: FORCE | $(BUILD)
	@echo '$(subst ','\'',$(FLAGS))' | cmp -s - $@ || echo '$(subst ','\'',$(FLAGS))' > $@
FORCE:


# >>library The library is compiled once per configuration, one object per header (from
# tests/inner/NAME.c if it exists). Test programs see only declarations and link all
# objects; their own code is compiled with -O1. The examples include the implementation.
# The *_DONE macros tell them that the linked library contains it. (readme.sh
# compiles each example with the command in its head.)
LIB   = $(patsubst %,$(BUILD)/lib_$(1)/%.o,$(PARTS)) $(SPM)
STEM  = $(patsubst %,%_,$(patsubst seqtx_%,%,$(filter-out seqtx,$(1))))
MACRO = SEQTX_$(shell echo '$(STEM)' | tr a-z A-Z)IMPLEMENTATION
define library
$(filter-out $(SPM),$(call LIB,$(1))): $(BUILD)/lib_$(1)/%.o: $(BUILD)/flags
	@mkdir -p $$(@D)
	$$(call say,CC)$$(T) $(2) $$(DEPS) -I. -D$$(call MACRO,$$*) -x c \
		-c $$(firstword $$(wildcard tests/inner/$$*.c) $$*.h) -o $$@
endef
$(BUILD)/spm.o: examples/spm.cpp $(BUILD)/flags
	$(call say,CXX)$(T) $(call cxx,-O2) $(DEPS) -c $< -o $@
F32 = $(call c)
F64 = $(call c,-O2 -DSEQTX_DOUBLE)
# CUDA is enabled for the tests of the GPU side. The only difference without it is a
# message, which test_api.c checks in the other builds. LESS: the address sanitizer also
# detects null pointers and accesses past an object when they are read or written. Clang's
# sanitizer checks unused pointers in the programs of the manuals (portability.sh).
# Without these checks compilation takes a third less time. FMA: an instruction replaces
# stx__fma in the portable loops, where it takes half of the time with sanitizers;
# test_bits.c calls it.
LESS    = -fno-sanitize=null,pointer-overflow,object-size
SAN_F32 = $(COMPILE) -std=c99 $(WARN) $(THREADS) $(CPPFLAGS) $(CFLAGS) $(SAN) $(LESS) $(FMA) \
	-DTEST_AMX_EMULATED -DSEQTX_CUDA -DSEQTX_CUDA_HOST -DSEQTX_NCCL
$(eval $(call library,f32,$$(F32)))
$(eval $(call library,f64,$$(F64)))
$(eval $(call library,san,$$(SAN_F32)))
$(eval $(call library,plain,$$(filter-out -DSEQTX_CBLAS,$$(F32))))
# For a new file of tests/inner, which the .d files do not contain yet.
$(foreach l,f32 f64 san plain cuda,$(foreach p,$(wildcard tests/inner/*.c),\
	$(eval $(BUILD)/lib_$(l)/$(p:tests/inner/%.c=%).o: $(p))))
DONE = $(foreach p,$(PARTS),-D$(call MACRO,$(p))_DONE) -DSTX_LOOPS_DONE

# objects of the headers that a program of examples/ includes
USED = $(BUILD)/lib_$(1)/seqtx.o $(patsubst %,$(BUILD)/lib_$(1)/%.o,$(shell \
	sed -n 's|^.include "\(\.\./\)\{0,1\}\(seqtx_[a-z_]*\)\.h".*|\2|p' $(2))) $(SPM)
$(foreach t,$(TRAINERS) $(TOOLS),$(eval $(t): $(call USED,f32,$(t:$(BUILD)/%=examples/%.c))))
$(TRAINERS) $(TOOLS): $(BUILD)/%: examples/%.c
	$(call say,CC)$(T) $(F32) $(DONE) -I. $(LINK)

# If there is an mpicc: the trainers as ranks, and a test in double. Only the core is
# compiled with MPI, with -O2, which takes half of the time of -O3.
WITH_MPI := $(shell command -v $(MPICC) 2>/dev/null)
$(BUILD)/lib_mpi/seqtx.o $(BUILD)/lib_mpi64/seqtx.o: seqtx.h $(BUILD)/flags
	@mkdir -p $(@D)
	$(call say,CC)$(T) $(MPICC) $(call flags,-O2 $(if $(findstring 64,$(@D)),-DSEQTX_DOUBLE) \
		-DSEQTX_MPI) $(DEPS) -I. -DSEQTX_IMPLEMENTATION -x c -c $< -o $@
MPI_TRAINERS = $(TRAINERS:$(BUILD)/%=$(BUILD)/mpi/%)
$(foreach t,$(TRAINERS),$(eval $(t:$(BUILD)/%=$(BUILD)/mpi/%): $(BUILD)/lib_mpi/seqtx.o \
	$(filter-out %/seqtx.o,$(call USED,f32,$(t:$(BUILD)/%=examples/%.c)))))
$(MPI_TRAINERS): $(BUILD)/mpi/%: examples/%.c
	@mkdir -p $(@D)
	$(call say,CC)$(T) $(MPICC) $(call flags) $(DONE) $(LINK)
$(BUILD)/test_group: tests/train/test_group.c $(BUILD)/lib_mpi64/seqtx.o \
		$(filter-out %/seqtx.o,$(call LIB,f64))
	$(call say,CC)$(T) $(MPICC) $(call flags,-O1 -DSEQTX_DOUBLE) $(LINK)

# plot uses only the version number of the library.
$(BUILD)/plot: examples/plot.c $(BUILD)/flags
	$(call say,CC)$(T) $(call c,-O2) $(DEPS) $(LDFLAGS) $< -o $@ -lm

ifndef SENTENCEPIECE
$(BUILD)/spm_train:
	@echo "spm_train needs SentencePiece (Debian: libsentencepiece-dev):" \
		"make SENTENCEPIECE=1 $@" >&2
	@exit 2
endif


# >>shared: a shared library that exports only the API, and an archive of the same
# objects. SOVERSION increases with every version that changes a struct or a function.
SOVERSION = 0
VERSION  := $(shell sed -n 's/^.define STX_VERSION  *"\(.*\)"/\1/p' seqtx.h)
SO        = $(SOVERSION)$(VERSION:$(firstword $(subst ., ,$(VERSION)))%=%)
EXPORT    = -fPIC -fvisibility=hidden -DSEQTX_API='__attribute__((visibility("default")))'
ifneq ($(WINDOWS),)
EXPORT    = -DSEQTX_API='__declspec(dllexport)'
SHARED    = $(BUILD)/libseqtx.dll
LINK_SHARED = -shared -Wl,--out-implib,$(SHARED).a
else ifneq ($(DARWIN),)
SHARED    = $(BUILD)/libseqtx.$(SO).dylib
LINKS     = libseqtx.$(SOVERSION).dylib libseqtx.dylib
LINK_SHARED = -dynamiclib -install_name "$(libdir)/libseqtx.$(SOVERSION).dylib" \
	-compatibility_version $(basename $(SO)) -current_version $(SO)
else
SHARED    = $(BUILD)/libseqtx.so.$(SO)
LINKS     = libseqtx.so.$(SOVERSION) libseqtx.so
LINK_SHARED = -shared -Wl,-soname,libseqtx.so.$(SOVERSION)
endif
# Only the trainers use SentencePiece.
SHARED_F32 = $(filter-out -DSEQTX_SENTENCEPIECE,$(F32))
$(PARTS:%=$(BUILD)/shared/%.o): $(BUILD)/shared/%.o: %.h $(BUILD)/flags
	@mkdir -p $(@D)
	$(call say,CC)$(T) $(SHARED_F32) $(EXPORT) $(DEPS) -I. -D$(call MACRO,$*) -x c -c $< -o $@
$(SHARED): $(PARTS:%=$(BUILD)/shared/%.o)
	$(call say,LD)$(T) $(SHARED_F32) $(LINK_SHARED) $(LDFLAGS) $^ -o $@ -lm \
		$(filter-out $(SPM_LIBS),$(LIBS))
	@for l in $(LINKS); do ln -sf $(@F) $(BUILD)/$$l; done
$(BUILD)/libseqtx.a: $(PARTS:%=$(BUILD)/shared/%.o)
	@rm -f $@
	$(call say,AR)$(AR) rcs $@ $^
shared: $(SHARED)
static: $(BUILD)/libseqtx.a


# >>install: package/install.sh contains the list of files.
PREFIX     ?= /usr/local
DESTDIR    ?=
prefix      = $(PREFIX)
exec_prefix = $(prefix)
bindir      = $(exec_prefix)/bin
libdir      = $(exec_prefix)/lib
includedir  = $(prefix)/include
datarootdir = $(prefix)/share
mandir      = $(datarootdir)/man
docdir      = $(datarootdir)/doc/seqtx
INSTALL     = install
DIRS        = prefix bindir libdir includedir datarootdir mandir docdir
INTO        = $(foreach d,$(DIRS),$(d)="$($(d))") DESTDIR="$(DESTDIR)" INSTALL="$(INSTALL)" \
	BUILD="$(BUILD)" VERSION="$(VERSION)" LIBS="$(LIBS)" PROGRAMS="$(TRAINERS)" \
	SHARED="$(SHARED)" LINKS="$(LINKS)"
install: all
	@$(INTO) sh package/install.sh install
install-headers:
	@$(INTO) sh package/install.sh install-headers
uninstall:
	@$(INTO) sh package/install.sh uninstall
# Made from the output of --help. Programs for another system cannot run here and get no
# pages.
man: $(BUILD)/man/made
$(BUILD)/man/made: $(TRAINERS) $(BUILD)/plot package/man.sh package/man.awk
	@sh package/man.sh $(@D) $(TRAINERS) $(BUILD)/plot
	@touch $@


# >>demo. DEMO: more options for the trainer, as in: make demo DEMO="--minutes 1"
$(BUILD)/demo.txt: examples/demo_data.sh | $(BUILD)
	sh examples/demo_data.sh $@
DATA = $(BUILD)/demo.txt
# The default text is the English of this repository. Any other text starts without a prompt.
PROMPT  = $(if $(filter $(BUILD)/demo.txt,$(DATA)),--prompt "Returns ")
LENGTH  = $(if $(filter --steps --minutes --plan --niter --epochs,$(DEMO)),,--minutes 2)
# $(call demo_of,FAMILY,NAME): trains BUILD/NAME.safetensors, with a log NAME.jsonl
define demo_of
	@rm -f $(BUILD)/$(2).safetensors $(BUILD)/$(2).jsonl
	$(BUILD)/train_$(1) --data "$(DATA)" --checkpoint $(BUILD)/$(2).safetensors $(LENGTH) \
		--log $(BUILD)/$(2).jsonl --generate 500 $(PROMPT) $(DEMO)
	@sh examples/demo_compare.sh $(BUILD)/$(2).jsonl "$(DATA)"
endef
demo demo-sru demo-compressive demo-par: $(filter $(BUILD)/demo.txt,$(DATA))
demo: $(BUILD)/train_attn_span
	$(call demo_of,attn_span,demo)
demo-sru: $(BUILD)/train_sru
	$(call demo_of,sru,demo_sru)
demo-compressive: $(BUILD)/train_compressive
	$(call demo_of,compressive,demo_compressive)

PAR = $(BUILD)/demo_par
demo-par: $(BUILD)/train_par
	@rm -f $(PAR).safetensors $(PAR).jsonl $(PAR)_search.safetensors $(PAR)_search.jsonl
	$(BUILD)/train_par --preset demo --data "$(DATA)" --checkpoint $(PAR)_search.safetensors \
		--log $(PAR)_search.jsonl --picture $(PAR).svg $(DEMO)
	$(BUILD)/train_par --checkpoint $(PAR)_search.safetensors --derive --derive-samples 4 \
		> $(PAR).found
	@cat $(PAR).found
	$(BUILD)/train_par --preset demo-found \
		--pattern "$$(sed -n 's/^best: \([^:]*\):.*/\1/p' $(PAR).found)" \
		--inherit $(PAR)_search.safetensors --data "$(DATA)" --log $(PAR).jsonl \
		--checkpoint $(PAR).safetensors --race xl --generate 500 $(PROMPT) $(DEMO)
	@sh examples/demo_compare.sh $(PAR).jsonl "$(DATA)"


# >>web: WebAssembly, and a page that trains and shows models. -DSEQTX_UNFUSED: WebAssembly
# has no fused multiply-add (docs/web.md). Debian's Emscripten finds acorn in NODE_PATH.
EMCC     ?= emcc
NODE     ?= node
WASM      = NODE_PATH=$${NODE_PATH:-/usr/share/nodejs} $(EMCC) -std=gnu99 -O3 -msimd128 $(WARN) \
	-DSEQTX_UNFUSED
WASM_PAGE = --no-entry -sTOTAL_STACK=1048576 -sERROR_ON_UNDEFINED_SYMBOLS=0 \
	-Wno-unused-function
# The memory of threads does not grow: growth makes every access slower.
WASM_POOL = -pthread -sINITIAL_MEMORY=536870912 -sMODULARIZE=1 -sEXPORT_NAME=seqtxThreads \
	-sPTHREAD_POOL_SIZE=4 -sENVIRONMENT=web,worker,node -sEXPORTED_RUNTIME_METHODS=wasmMemory
WEB       = $(BUILD)/web
PAGE      = $(wildcard examples/web/*.js examples/web/page.*)
$(WEB)/seqtx.wasm: examples/web/web.c $(PARTS:%=%.h)
	@mkdir -p $(@D)
	$(call say,EMCC)$(WASM) -DSEQTX_NO_THREADS $(WASM_PAGE) \
		-sALLOW_MEMORY_GROWTH=1 -sMAXIMUM_MEMORY=1073741824 $< -o $@
$(WEB)/seqtx-threads.js: examples/web/web.c $(PARTS:%=%.h)
	@mkdir -p $(@D)
	$(call say,EMCC)$(WASM) $(WASM_PAGE) $(WASM_POOL) $< -o $@
$(WEB)/seqtx.html: $(WEB)/seqtx.wasm $(PAGE) $(TRAINERS) $(BUILD)/demo.txt
	$(call say,PAGE)$(NODE) examples/web/build.js $@ $< $(BUILD) $(BUILD)/demo.txt
web: $(WEB)/seqtx.html $(WEB)/seqtx-threads.js


# >>tests: not in copies of the tree without tests/
-include tests/tests.mk


# >>cuda: nvcc compiles seqtx_cuda.cu, the C compiler everything else.
CUDA_ARCH =
CUDA_DIR := $(shell sh tests/cuda/cuda_dir.sh "$(NVCC)")
# The programs find the libraries where they were linked: not all machines have them in
# ld.so.conf.
COMMA    := ,
RPATH     = $(patsubst -L%,-Wl$(COMMA)-rpath$(COMMA)%,$(filter -L%,$(1)))
CUDA_LIBS = -L$(CUDA_DIR)/lib64 $(call RPATH,-L$(CUDA_DIR)/lib64 $(if $(NCCL),$(NCCL_LIBS))) \
	$(if $(NCCL),$(or $(NCCL_LIBS),-lnccl)) -lcublasLt -lcudart -lstdc++ -lm
CUDA_NCCL = $(if $(NCCL),-DSEQTX_NCCL $(NCCL_FLAGS))
CUDA_TESTS = $(TESTS_CUDA:%=$(BUILD)/cuda/test_cuda_%)
GENCODE = $(foreach a,$(patsubst sm_%,%,$(CUDA_ARCH)),-gencode arch=compute_$(a),code=sm_$(a))
$(BUILD)/cuda:
	@mkdir -p $(BUILD)/cuda
$(BUILD)/cuda/arch: FORCE | $(BUILD)/cuda
	@sh tests/cuda/cuda_arch.sh "$(NVCC)" $(CUDA_ARCH)
	@echo '$(NVCC) $(CUDA_ARCH) $(CUDA_NCCL) $(CUDA_LIBS)' | cmp -s - $@ || \
		echo '$(NVCC) $(CUDA_ARCH) $(CUDA_NCCL) $(CUDA_LIBS)' > $@
$(BUILD)/cuda/seqtx_cuda.o: tests/inner/seqtx_cuda.cu tests/inner/inner.h seqtx_cuda.cu \
		$(PARTS:%=%.h) $(BUILD)/cuda/arch
	$(NVCC) -O3 -std=c++17 $(GENCODE) $(CUDA_NCCL) -Xcompiler -Wall,-Wextra -c $< -o $@
GPU_F32 = $(F32) -DSEQTX_CUDA $(if $(NCCL),-DSEQTX_NCCL)
$(eval $(call library,gpu,$$(GPU_F32)))
$(foreach t,$(TRAINERS),$(eval $(t:$(BUILD)/%=$(BUILD)/cuda/%): \
	$(call USED,gpu,$(t:$(BUILD)/%=examples/%.c))))
$(TRAINERS:$(BUILD)/%=$(BUILD)/cuda/%): \
		$(BUILD)/cuda/%: examples/%.c $(BUILD)/cuda/seqtx_cuda.o
	$(GPU_F32) $(DONE) $(DEPS) $< $(filter %.o,$^) -o $@ $(CUDA_LIBS) $(LIBS)
$(CUDA_NEW:%=$(BUILD)/cuda/test_cuda_%): $(BUILD)/cuda/test_cuda_%: \
		test_cuda_%.c $(BUILD)/cuda/seqtx_cuda.o $(call LIB,gpu)
	$(GPU_F32) -O1 $(DEPS) $^ -o $@ $(CUDA_LIBS) $(LIBS)
$(patsubst %,$(BUILD)/cuda/test_cuda_%,$(filter golden_%,$(TESTS_CUDA))): \
		$(BUILD)/cuda/test_cuda_%: test_%.c $(BUILD)/cuda/seqtx_cuda.o $(call LIB,gpu)
	$(GPU_F32) -O1 -DGOLDEN_DEVICE=STX_CUDA $(DEPS) $^ -o $@ $(CUDA_LIBS) $(LIBS)
$(BUILD)/cuda/bench_cuda: bench/cuda/bench_cuda.c bench/cuda/cuda_model.h bench/report.h \
		$(PARTS:%=%.h) $(BUILD)/flags $(BUILD)/cuda/seqtx_cuda.o
	$(GPU_F32) -isystem $(CUDA_DIR)/include $< $(BUILD)/cuda/seqtx_cuda.o -o $@ \
		$(CUDA_LIBS) $(LIBS)
$(BUILD)/bench_cuda_host: bench/cuda/bench_cuda.c bench/cuda/cuda_model.h bench/report.h \
		$(BUILD)/cuda_kernels.o $(BUILD)/cuda_host.o $(BUILD)/flags
	$(CUDA_F32) $(DEPS) -c $< -o $@.o
	$(CXX) $@.o $(BUILD)/cuda_kernels.o $(BUILD)/cuda_host.o -o $@ -lm -lpthread $(LIBS)
cuda: $(TRAINERS:$(BUILD)/%=$(BUILD)/cuda/%)
check-cuda: cuda $(CUDA_TESTS)
	@sh tests/cuda/check_cuda.sh $(TESTS_CUDA)
bench-cuda: $(BUILD)/cuda/bench_cuda
	sh bench/run_cuda.sh $(BENCH)

bench:
	CC="$(CC)" sh bench/run.sh $(BENCH)

-include $(wildcard $(BUILD)/*.d $(BUILD)/*/*.d $(BUILD)/*/*/*.d)
# A source file that was removed but is still named in a .d file: what was made from it is
# made again. (Headers have -MP.)
%.c: ;
%.cu: ;
%.cpp: ;

clean:
	rm -rf $(BUILD)
endif
