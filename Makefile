# seqtx: header-only; this builds the examples and the tests.
#
#   make demo [DATA=FILE]   train a small model on real text, about two minutes on two cores; leaves build/demo.safetensors
#   make test               build and run every test; ends with "N passed, N failed"
#   make examples           build/train_attn_span, build/hello
#   make bench              timings, against CBLAS and PyTorch where they are installed
#
# Set CC, CXX, ARCH (-march=native, say: the fast paths do not need it), OPENMP= (to build without threads), CBLAS=1 (to link a CBLAS),
# ONEDNN=1 (oneDNN; ONEDNN_FLAGS and ONEDNN_LIBS where it is not in the usual places: -I.., -L.. -ldnnl).

CC      = cc
CXX     = c++
ARCH    =
WARN    = -Wall -Wextra -Wpedantic -Wshadow -Werror
OPENMP := $(shell printf 'int main(void){return 0;}' | $(CC) -fopenmp -x c - -o /dev/null 2>/dev/null && echo -fopenmp)
CFLAGS  = -std=c99 -O3 $(ARCH) $(WARN)
ifdef CBLAS
CFLAGS += -DSEQTX_CBLAS
LDLIBS += $(or $(CBLAS_LIBS),-lopenblas)
endif
ifdef ONEDNN
CFLAGS += -DSEQTX_ONEDNN $(ONEDNN_FLAGS)
LDLIBS += $(or $(ONEDNN_LIBS),-ldnnl)
endif
SAN     = -fsanitize=address,undefined -fno-sanitize-recover=all -g -O1

HEADERS = seqtx.h seqtx_attn_span.h build/flags
TESTS_H = $(wildcard tests/*.h)

.PHONY: all examples demo test bench clean FORCE
all: examples
examples: build/train_attn_span build/hello

build:
	@mkdir -p build
# build/flags changes when the flags do, and everything is built again
build/flags: FORCE | build
	@echo '$(CC) $(CXX) $(CFLAGS) $(OPENMP) $(LDLIBS)' | cmp -s - $@ || echo '$(CC) $(CXX) $(CFLAGS) $(OPENMP) $(LDLIBS)' > $@
FORCE:

build/train_attn_span: examples/train_attn_span.c examples/train.h $(HEADERS) | build
	$(CC) $(CFLAGS) $(OPENMP) $< -o $@ -lm $(LDLIBS)
build/hello: examples/hello.c $(HEADERS) | build
	$(CC) $(CFLAGS) $(OPENMP) $< -o $@ -lm $(LDLIBS)

# >>demo
build/demo.txt: examples/demo_data.sh | build
	sh examples/demo_data.sh $@
DATA = build/demo.txt
demo: build/train_attn_span $(DATA)
	@rm -f build/demo.safetensors
	GOMP_SPINCOUNT=20000 build/train_attn_span --preset demo --data $(DATA) --checkpoint build/demo.safetensors --generate 500 --prompt "#ifndef _"

# >>tests: each program prints "N passed, N failed"; tests/run.sh adds them up
UNIT = build/test_api build/test_io build/test_train_h build/test_span build/test_golden_ops build/test_golden_span build/test_bf16
F64  = build/test_grad build/test_golden_ops_f64 build/test_golden_span_f64 build/test_bf16_f64
ASAN = build/test_api_san build/test_io_san build/test_span_san build/test_golden_ops_san build/test_golden_span_san build/fuzz_io_san build/test_bf16_san

build/test_grad: tests/test_grad.c $(TESTS_H) $(HEADERS) | build
	$(CC) $(CFLAGS) -DSEQTX_DOUBLE $(OPENMP) $< -o $@ -lm $(LDLIBS)
build/test_%_f64: tests/test_%.c $(TESTS_H) $(HEADERS) | build
	$(CC) $(CFLAGS) -DSEQTX_DOUBLE $(OPENMP) $< -o $@ -lm $(LDLIBS)
build/test_%_san: tests/test_%.c $(TESTS_H) $(HEADERS) | build
	$(CC) -std=c99 $(WARN) $(SAN) $(OPENMP) $< -o $@ -lm
build/test_bf16_san: tests/test_bf16.c $(TESTS_H) $(HEADERS) | build
	$(CC) -std=c99 $(WARN) $(SAN) -DSEQTX_AMX_EMULATED $(OPENMP) $< -o $@ -lm
build/fuzz_io_san: tests/fuzz_io.c $(TESTS_H) $(HEADERS) | build
	$(CC) -std=c99 $(WARN) $(SAN) $(OPENMP) $< -o $@ -lm
build/test_train_h: tests/test_train_h.c examples/train.h build/flags | build
	$(CC) $(CFLAGS) $< -o $@ -lm
build/test_%: tests/test_%.c $(TESTS_H) $(HEADERS) | build
	$(CC) $(CFLAGS) $(OPENMP) $< -o $@ -lm $(LDLIBS)

test: $(UNIT) $(F64) $(ASAN) examples
	@CC="$(CC)" CXX="$(CXX)" ONEDNN_FLAGS="$(ONEDNN_FLAGS)" ONEDNN_LIBS="$(ONEDNN_LIBS)" sh tests/run.sh

bench:
	CC="$(CC)" sh bench/run.sh $(BENCH)

clean:
	rm -rf build
