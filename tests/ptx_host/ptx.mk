# ptx.mk - the part of tests.mk for tests/ptx_host: the kernels as nvcc compiles them, run
# by an interpreter of PTX under the same tests as the kernels that g++ compiles.
#
# `make test` runs a sample for sm_90 if nvcc is installed. `make test-ptx-all` runs all
# tests for every architecture, checks that they run every kernel, repeats some with the
# errors of the hardware's approximations, and runs mutations.sh.
PTX_FULL := $(filter %test-ptx-all,$(MAKECMDGOALS))
HAS_NVCC := $(shell command -v $(NVCC) 2>/dev/null)


# >>programs. The interpreter is made for processors with 256-bit vectors, and works
# without them.
V3       := $(if $(FMA),$(shell echo 'int main(void){return 0;}' | $(CXX) -march=x86-64-v3 \
	-x c++ - -o /dev/null 2>/dev/null && echo -march=x86-64-v3)) -ffp-contract=off
PTX_OF    = $(patsubst tests/ptx_host/%.cpp,$(BUILD)/ptx_host/%.o,$(1))
PTX_TESTS = $(call PTX_OF,$(wildcard tests/ptx_host/test_*.cpp))
PTX_HOST  = $(filter-out $(PTX_TESTS),$(call PTX_OF,$(wildcard tests/ptx_host/*.cpp)))
$(PTX_TESTS) $(PTX_HOST): $(BUILD)/ptx_host/%.o: tests/ptx_host/%.cpp $(BUILD)/flags
	@mkdir -p $(@D)
	$(call say,CXX)$(T) $(call host,-O$(if $(filter test_%,$*),0,3) $(V3)) $(DEPS) -c $< -o $@
$(BUILD)/test_ptx: $(PTX_TESTS) $(filter-out %/executor.o %/symbols.o,$(PTX_HOST))
	$(call say,LD)$(T) $(CXX) $(CXXFLAGS) $(LDFLAGS) $^ -o $@
$(TESTS_CUDA:%=$(BUILD)/test_cuda_%_ptx): $(BUILD)/test_cuda_%_ptx: $(BUILD)/test_cuda_%.o \
		$(SHIM) $(PTX_HOST)
	$(call say,LD)$(LINK_SHIM)
$(BUILD)/step_cuda.o: bench/cuda/step_cuda.c $(BUILD)/flags
	$(call say,CC)$(T) $(CUDA_F32) $(DEPS) -c $< -o $@
$(BUILD)/step_cuda_ptx: $(BUILD)/step_cuda.o $(SHIM) $(PTX_HOST)
	$(call say,LD)$(LINK_SHIM)
$(BUILD)/seqtx_cuda_%.ptx: seqtx_cuda.cu $(PARTS:%=%.h) $(BUILD)/flags
	$(call say,NVCC)$(T) $(NVCC) -ptx -std=c++17 -O3 -lineinfo -arch=$* -I. $< -o $@


# >>runs: ptx_ARCH_TEST, and after them ptx_ARCH_coverage
$(call RUN,ptx_tables,,sh tests/ptx_host/tables.sh)
ifeq ($(HAS_NVCC)$(FULL),)
RUNS += ptx
run-ptx:
	@sh tests/run.sh --skip ptx 'no nvcc'
else ifeq ($(HAS_NVCC),)
$(call RUN,ptx,$(BUILD)/test_ptx,$(BUILD)/test_ptx)
else
PTX_ARCHS := sm_90
PTX_SET   := golden_ops golden_sru sru par comp gemm ops model
PTX_ARG    = $(if $(filter model,$(1)),ops,$(if $(filter golden_%,$(1)),,short))
ifneq ($(PTX_FULL),)
PTX_ARCHS := sm_80 sm_90 $(if $(filter compute_100,$(shell $(NVCC) --list-gpu-arch)),sm_100)
PTX_SET   := $(TESTS_CUDA)
PTX_ARG    =
endif
PTX_FILE   = $(BUILD)/seqtx_cuda_$(1).ptx
COUNTERS   = $(BUILD)/ran/ptx_$(1)_$(2).counters
# $(call RUN_PTX,ARCH,TEST,NAME,SETTINGS[,ARGUMENT])
RUN_PTX    = $(call RUN,$(3),$(BUILD)/test_cuda_$(2)_ptx $(call PTX_FILE,$(1)),\
	env PTX_FILE=$(call PTX_FILE,$(1)) PTX_REGISTERS=tests/cuda/cuda_regs.txt $(4) \
	$(BUILD)/test_cuda_$(2)_ptx $(or $(5),$(call PTX_ARG,$(2))))
$(call RUN,ptx,$(BUILD)/test_ptx $(PTX_ARCHS:%=$(BUILD)/seqtx_cuda_%.ptx),\
	$(BUILD)/test_ptx coverage $(PTX_ARCHS:%=$(BUILD)/seqtx_cuda_%.ptx))
$(foreach a,$(PTX_ARCHS),$(foreach t,$(PTX_SET),$(call RUN_PTX,$(a),$(t),ptx_$(a)_$(t),\
	CUDA_ORDERS=1 PTX_COUNTERS=$(call COUNTERS,$(a),$(t)))))
ifneq ($(PTX_FULL),)
$(call RUN,ptx_registers,$(BUILD)/test_cuda_ops_ptx $(call PTX_FILE,sm_90),\
	sh tests/ptx_host/registers.sh $(call PTX_FILE,sm_90) $(BUILD)/test_cuda_ops_ptx optimisers)
$(foreach t,$(filter-out group model attention,$(TESTS_CUDA)),\
	$(call RUN_PTX,sm_90,$(t),ptx_approximate_$(t),CUDA_ORDERS=1 PTX_APPROXIMATE=1))
$(call RUN_PTX,sm_90,attention,ptx_approximate_attention,CUDA_ORDERS=1 PTX_APPROXIMATE=1,short)
define ptx_coverage
RUNS += ptx_$(1)_coverage
run-ptx_$(1)_coverage: $(PTX_SET:%=run-ptx_$(1)_%)
	@sh tests/run.sh ptx_$(1)_coverage sh tests/ptx_host/coverage.sh $(call PTX_FILE,$(1)) \
		$(foreach t,$(PTX_SET),$(call COUNTERS,$(1),$(t)))
endef
$(foreach a,$(PTX_ARCHS),$(eval $(call ptx_coverage,$(a))))
$(call RUN,ptx_mutations,$(patsubst %,$(BUILD)/test_cuda_%_ptx,sru ops comp par attention),\
	env MADE=1 LIBS="$(LIBS)" sh tests/ptx_host/mutations.sh)
endif
endif
