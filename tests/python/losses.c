/* losses.c - trains a small model of each family, and prints its losses in hexadecimal
   and a greedy continuation. test_seqtx.py does the same in Python and compares. */
#include "../../seqtx_attn_span.h"
#include "../../seqtx_compressive.h"
#include "../../seqtx_par.h"
#include "../../seqtx_sru.h"
#include <stdio.h>
#include <string.h>

enum { B = 3, T = 16, STEPS = 12 };

static void train(const char *name, stx_lm lm, int optimiser) {
    stx_ctx *x = lm.ctx;
    stx_optim_desc d;
    stx_optim *optim;
    void *state = lm.state_create(lm.model, B, 0);
    void *gen;
    const stx_real *scores;
    int32_t token = 7;
    int step, i;
    memset(&d, 0, sizeof d);
    d.kind = optimiser;
    d.clip = 1;
    optim = stx_optim_create(lm.params, &d);
    for (step = 0; step < STEPS; step++) {
        int32_t in[B * T], out[B * T];
        stx_tensor *nll, *total;
        for (i = 0; i < B * T; i++) {
            int t = step * T + i % T + 5 * (i / T);
            in[i] = t * t % 31;
            out[i] = (t + 1) * (t + 1) % 31;
        }
        stx_begin(x, STX_TRAIN);
        nll = lm.loss(lm.model, stx_tokens(x, in, B, T), stx_tokens(x, out, B, T), state, state);
        total = lm.total(lm.model, nll);
        printf("%s %a %a\n", name, stx_item(x, nll), stx_item(x, total));
        stx_backward(x, total);
        if (stx_optim_step(optim, 0.004 / (step + 1))) lm.updated(lm.model);
    }
    gen = lm.gen_create(lm.model, 1, 0);
    for (i = 0; i < 20; i++) {
        scores = lm.gen_feed(gen, &token, 1);
        token = scores ? stx_sample(NULL, 0, scores, 31, NULL) : -1;
        printf("%s id %d\n", name, (int)token);
    }
    printf("%s%s%s\n", name, stx_ok(x) ? "" : " failed: ", stx_error(x));
    stx_destroy(x);
}

static stx_ctx *context(void) {
    stx_desc d;
    memset(&d, 0, sizeof d);
    d.threads = 1;
    d.seed = 11;
    return stx_create(&d);
}

int main(void) {
    static const size_t mems[] = {16, 8};
    stx_span_desc span;
    stx_sru_lm_desc sru;
    stx_comp_desc comp;
    stx_par_desc par;

    memset(&span, 0, sizeof span);
    span.vocab = 31;
    span.layers = 2;
    span.dim = 32;
    span.heads = 2;
    span.span = 32;
    span.adapt_span = 1;
    span.span_loss = 0.001;
    span.dropout = 0.1;
    train("attn_span", stx_span_as_lm(stx_span_create(context(), &span)), STX_ADAM);

    memset(&sru, 0, sizeof sru);
    sru.vocab = 31;
    sru.dim = 32;
    sru.sru.layers = 2;
    sru.sru.heads = 2;
    sru.sru.transform = STX_SRU_ATTENTION;
    sru.sru.norm = STX_SRU_NORM_AFTER;
    sru.dropout = 0.1;
    train("sru", stx_sru_as_lm(stx_sru_lm_create(context(), &sru)), STX_RADAM);

    memset(&comp, 0, sizeof comp);
    comp.vocab = 31;
    comp.layers = 2;
    comp.dim = 32;
    comp.heads = 2;
    comp.segment = T;
    comp.mems = mems;
    comp.gate = STX_COMP_GATE_GRU;
    train("compressive", stx_comp_as_lm(stx_comp_create(context(), &comp)), STX_ADAMW);

    memset(&par, 0, sizeof par);
    par.vocab = 31;
    par.pattern = "(sf)2";
    par.dim = 32;
    par.heads = 2;
    par.segment = T;
    par.cutoff[0] = 10;
    par.cutoffs = 1;
    par.emb_scale = 0.5;
    train("par", stx_par_as_lm(stx_par_create(context(), &par)), STX_MUON);
    return 0;
}
