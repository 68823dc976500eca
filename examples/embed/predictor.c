/* predictor.c - see predictor.h. This file includes only the declarations of seqtx; the
   implementation is compiled in seqtx.c. */
#include "predictor.h"
#include "seqtx_attn_span.h"
#include <stdlib.h>

enum { T = 32 };

struct predictor {
    stx_ctx *x;
    stx_span *model;
    stx_span_state *memory;
    stx_optim *adam;
};

predictor *predictor_create(void) {
    predictor *p = (predictor *)calloc(1, sizeof *p);
    stx_span_desc d = {0};
    stx_optim_desc od = {0};
    if (!p) return NULL;
    d.vocab = 256;
    d.layers = 2;
    d.dim = 32;
    d.heads = 2;
    d.span = 64;
    p->x = stx_create(NULL);
    p->model = stx_span_create(p->x, &d);
    p->memory = stx_span_state_create(p->model, 1);
    p->adam = stx_optim_create(stx_span_params(p->model), &od);
    return p;
}

void predictor_free(predictor *p) {
    if (p) stx_destroy(p->x); /* frees the model, its memory and the optimiser */
    free(p);
}

double predictor_learn(predictor *p, const char *text, size_t n) {
    double nats = 0;
    size_t i, blocks = 0;
    stx_span_state_reset(p->memory); /* a text starts without context */
    for (i = 0; i + T < n && stx_ok(p->x); i += T, blocks++) {
        int32_t t[T + 1];
        stx_tensor *nll;
        for (size_t k = 0; k <= T; k++) t[k] = (unsigned char)text[i + k];
        stx_begin(p->x, STX_TRAIN);
        nll = stx_span_loss(p->model, stx_tokens(p->x, t, 1, T), stx_tokens(p->x, t + 1, 1, T),
                            p->memory, p->memory);
        stx_backward(p->x, stx_span_total(p->model, nll));
        nats += (double)stx_item(p->x, nll);
        stx_optim_step(p->adam, 0.003);
    }
    return blocks ? nats / (double)blocks / 0.69314718 : 0;
}

size_t predictor_continue(predictor *p, const char *prompt, char *out, size_t n) {
    stx_span_gen *gen = stx_span_gen_create(p->model, 1);
    const stx_real *log_p = NULL;
    stx_sampling how = {0};
    stx_real work[256];
    size_t i;
    how.temperature = 0.1;
    for (; *prompt; prompt++) {
        int32_t token = (unsigned char)*prompt;
        log_p = stx_span_gen_feed(gen, &token, 1);
    }
    for (i = 0; i < n && log_p; i++) {
        int32_t token = stx_sample(&how, i, log_p, 256, work);
        out[i] = (char)token;
        log_p = stx_span_gen_feed(gen, &token, 1);
    }
    stx_span_gen_free(gen);
    return i;
}

const char *predictor_error(const predictor *p) {
    return stx_error(p->x);
}
