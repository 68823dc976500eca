// app.cpp - seqtx from C++. A context owns everything created in it, so one smart
// pointer is enough. CMakeLists.txt builds it. Usage: app [STEPS]
#include "seqtx_attn_span.h"
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

struct ctx_deleter {
    void operator()(stx_ctx *x) const { stx_destroy(x); }
};
using ctx = std::unique_ptr<stx_ctx, ctx_deleter>;

// Errors are sticky, so one check per step is enough.
static void check(const ctx &x) {
    if (!stx_ok(x.get())) throw std::runtime_error(stx_error(x.get()));
}

int main(int argc, char **argv) try {
    const int steps = argc > 1 ? std::atoi(argv[1]) : 200;
    ctx x(stx_create(nullptr));
    stx_span_desc d = {};
    stx_optim_desc od = {};
    d.vocab = 256;
    d.layers = 2;
    d.dim = 32;
    d.heads = 2;
    d.span = 64;
    d.adapt_span = 1;
    stx_span *model = stx_span_create(x.get(), &d);
    stx_optim *adam = stx_optim_create(stx_span_params(model), &od);
    check(x);

    const std::string text = "the cat sat on the mat. ";
    const size_t T = 48;
    std::vector<int32_t> in(T), next(T);
    for (int step = 1; step <= steps; step++) {
        for (size_t i = 0; i < T; i++) {
            const size_t at = static_cast<size_t>(step) * T + i;
            in[i] = static_cast<unsigned char>(text[at % text.size()]);
            next[i] = static_cast<unsigned char>(text[(at + 1) % text.size()]);
        }
        stx_begin(x.get(), STX_TRAIN);
        stx_tensor *nll = stx_span_loss(model, stx_tokens(x.get(), in.data(), 1, T),
                                        stx_tokens(x.get(), next.data(), 1, T), nullptr, nullptr);
        stx_backward(x.get(), stx_span_total(model, nll));
        if (stx_optim_step(adam, 0.003)) stx_span_clamp(model);
        check(x);
        if (step % 50 == 0 || step == steps) {
            const double nats = stx_item(x.get(), nll);
            std::printf("step %d: %.3f bits per byte\n", step, nats / 0.69314718);
        }
    }
} catch (const std::exception &e) {
    std::fprintf(stderr, "app: %s\n", e.what());
    return 1;
}
