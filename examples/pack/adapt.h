/* pack/adapt.h - --adapt: the model learns from what is already coded. Packing and
   unpacking make the same training steps at the same places, so that they have the same
   model. */
#pragma once
#include "base.h"
#include "lanes.h"

/* After every BLOCK tokens of all lanes together, STEPS training steps, each with ROWS
   windows of WINDOW tokens. These numbers are part of the format. */
enum { BLOCK = 512, STEPS = 2, ROWS = 16, WINDOW = 64 };

/* new_model: 1 if the model begins without training. */
static void adapt_begin(pack *p, int new_model) {
    stx_optim_desc d;
    memset(&d, 0, sizeof d);
    d.kind = STX_MUON;
    d.clip = 1;
    d.weight_decay = 0.01;
    p->optim = stx_optim_create(p->m.lm.params, &d);
    p->rate.kind = STX_LR_COSINE;
    p->rate.lr = new_model ? 0.01 : 0.003;
    p->rate.lr_min = p->rate.lr / 4;
    p->rate.warmup = 20;
    check(&p->m);
}

/* Returns 1 if each lane has `every` tokens that the training state has not read. */
static int all_new(const pack *p, size_t every) {
    size_t i = 0;
    while (i < p->lanes && p->team[i].r
           && p->team[i].here.end - p->team[i].here.begin > every) i++;
    return i == p->lanes && every <= WINDOW;
}

/* The first training step reads the newest tokens of all lanes, with the state after the
   older ones. The others read random windows. */
static void adapt(pack *p, size_t every) {
    stx_ctx *x = p->m.x;
    const stx_lm *lm = &p->m.lm;
    for (int k = 0; k < STEPS; k++) {
        static int32_t in[MAX_LANES], next[MAX_LANES];   /* (rows,T) */
        const int newest = k == 0 && all_new(p, every);
        const size_t T = newest ? every : (size_t)WINDOW;
        const size_t rows = newest ? p->lanes : (size_t)ROWS;
        for (uint32_t i = 0; i < rows; i++) {
            uint32_t u[4];
            stx_philox(1, p->updates, i, u);
            size_t j = newest ? i : u[0] % p->lanes, tries = 0;
            while (p->team[j].here.end - p->team[j].here.begin <= T) {
                if (++tries == p->lanes) return;
                j = (j + 1) % p->lanes;
            }
            const place *l = &p->team[j].here;
            const uint64_t starts = l->end - l->begin - T;
            const size_t back = newest ? 0 : (size_t)(u[1] * starts >> 32);
            const int32_t *from = p->t.token + (l->end - back - T);
            memcpy(in + i * T, from - 1, T * sizeof *in);
            memcpy(next + i * T, from, T * sizeof *in);
        }
        stx_begin(x, STX_TRAIN);
        stx_tensor *nll = lm->loss(lm->model, stx_tokens(x, in, rows, T),
                                   stx_tokens(x, next, rows, T), newest ? p->state : NULL,
                                   newest ? p->state : NULL);
        stx_backward(x, lm->total(lm->model, nll));
        if (stx_optim_step(p->optim, stx_schedule_lr(&p->rate, ++p->updates)))
            lm->updated(lm->model);
        check(&p->m);
    }
}
