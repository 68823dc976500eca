/* step_cuda.c - runs a training step of a small model on tests/cuda_host, so that the
   interpreter of PTX (tests/ptx_host) can count what its kernels do. Layers and streams
   are few, but layers have the sizes of the GPU benchmarks: the work of a block is
   representative, and the number of blocks is not. 9 streams are the fewest with which
   the forward pass of attention uses tiles of 128 queries.

       make build/step_cuda_ptx build/seqtx_cuda_sm_90.ptx
       PTX_FILE=build/seqtx_cuda_sm_90.ptx PTX_LAUNCHES=build/span.launches \
           build/step_cuda_ptx span
       build/step_cuda_ptx          lists the models */
#include "../../seqtx_attn_span.h"
#include "../../seqtx_compressive.h"
#include "../../seqtx_par.h"
#include "../../seqtx_sru.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* tests/ptx_host/executor.cpp: forgets the launches so far. */
extern void ptx_launches_restart(void);

static void check(const stx_ctx *x) {
    if (stx_ok(x)) return;
    fprintf(stderr, "step_cuda: %s\n", stx_error(x));
    exit(1);
}


// >>models

static stx_lm span_create(stx_ctx *x) {
    static const double z[8] = {448, 256, 128, 48, 48, 48, 48, 48};
    stx_real values[8];
    stx_span_desc d;
    stx_span *m;
    int h;
    memset(&d, 0, sizeof d);
    d.vocab = 256;
    d.layers = 1;
    d.dim = 512;
    d.heads = 8;
    d.span = 1024;
    d.adapt_span = 1;
    d.span_loss = 5e-7;
    m = stx_span_create(x, &d);
    check(x);
    for (h = 0; h < 8; h++) values[h] = (stx_real)(z[h] / 1024);
    stx_set(x, m->layer[0].z, values);
    return stx_span_as_lm(m);
}

static stx_lm all_attention_create(stx_ctx *x) {
    stx_span_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = 20000;
    d.adapt_io = 1;
    d.adapt_io_tied = 1;
    d.cutoff[0] = 2000;
    d.cutoff[1] = 8000;
    d.cutoffs = 2;
    d.layers = 1;
    d.dim = 512;
    d.heads = 8;
    d.span = 256;
    d.pers = 1024;
    d.dropout = 0.1;
    return stx_span_as_lm(stx_span_create(x, &d));
}

static stx_lm xl_create(stx_ctx *x) {
    stx_par_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = 20000;
    d.words_out = STX_PAR_OUT_ADAPTIVE;
    d.adaptive_in = d.tie_words = 1;
    d.cutoff[0] = 2000;
    d.cutoff[1] = 8000;
    d.cutoffs = 2;
    d.div_val = 4;
    d.dim = 512;
    d.heads = 8;
    d.pattern = "sf";
    d.segment = 256;
    d.dropout = 0.1;
    return stx_par_as_lm(stx_par_create(x, &d));
}

static stx_lm search_create(stx_ctx *x) {
    stx_par_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = 205;
    d.words_out = STX_PAR_OUT_TIED;
    d.dim = 512;
    d.heads = 8;
    d.blocks = 2;
    d.segment = 128;
    d.latency = STX_PAR_LATENCY_HINGE;
    d.latency_weight = 0.1;
    d.latency_target = 1;
    d.cost[0] = 2;
    d.cost[1] = 1;
    return stx_par_as_lm(stx_par_create(x, &d));
}

static stx_comp_desc comp_desc(size_t segment, int gate) {
    stx_comp_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = 256;
    d.dim = 512;
    d.heads = 8;
    d.layers = 1;
    d.segment = segment;
    d.gate = gate;
    return d;
}

static stx_lm comp_create(stx_ctx *x) {
    stx_comp_desc d = comp_desc(256, STX_COMP_GATE_GRU);
    d.glu = 1;
    return stx_comp_as_lm(stx_comp_create(x, &d));
}

static stx_lm comp_used_create(stx_ctx *x) {
    stx_comp_desc d = comp_desc(256, STX_COMP_GATE_HIGHWAY);
    d.compress = STX_COMP_COMPRESS_USED;
    d.positions = STX_COMP_POSITIONS_XL;
    return stx_comp_as_lm(stx_comp_create(x, &d));
}

static stx_lm comp_pool_create(stx_ctx *x) {
    stx_comp_desc d = comp_desc(128, STX_COMP_GATE_GTRXL);
    d.compress = STX_COMP_COMPRESS_MAX;
    return stx_comp_as_lm(stx_comp_create(x, &d));
}

static stx_lm sru_desc_create(stx_ctx *x, size_t dim, int transform) {
    stx_sru_lm_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = 256;
    d.dim = dim;
    d.sru.layers = 1;
    d.sru.transform = transform;
    d.dropout = 0.1;
    return stx_sru_as_lm(stx_sru_lm_create(x, &d));
}

static stx_lm sru_create(stx_ctx *x) {
    return sru_desc_create(x, 1536, STX_SRU_LINEAR);
}

static stx_lm sru_pp_create(stx_ctx *x) {
    return sru_desc_create(x, 1024, STX_SRU_ATTENTION);
}

static const struct {
    const char *name, *what;
    stx_lm (*create)(stx_ctx *x);
    size_t streams, tokens, vocab;
    int steps, optimiser;   /* the last of the steps is counted, with a full memory */
} models[] = {
    {"span", "adaptive spans: 512 wide, 8 heads of 64 with spans 48 .. 448, Adagrad",
     span_create, 9, 512, 256, 2, STX_ADAGRAD},
    {"all-attention", "all-attention: 512 wide, 8 heads, 1024 persistent vectors, dropout, Adam",
     all_attention_create, 4, 256, 20000, 2, STX_ADAM},
    {"xl", "Transformer-XL: 512 wide, 8 heads, 256 + 256, adaptive words, dropout, LAMB",
     xl_create, 4, 256, 20000, 2, STX_LAMB},
    {"search", "PAR's supernet: 2 mixtures, 512 wide, 128 + 128, AdamW", search_create, 4, 128, 205,
     3, STX_ADAMW},
    {"compressive", "Compressive: 512 wide, 256 + 256 + 64, convolution, GRU gates, GLU",
     comp_create, 4, 256, 256, 3, STX_ADAM},
    {"compressive-used", "Compressive: the most used rows, positions of Transformer-XL, highway",
     comp_used_create, 4, 256, 256, 3, STX_ADAM},
    {"compressive-pool", "Compressive: the maximum of 4 rows, gates of GTrXL", comp_pool_create, 2,
     128, 256, 3, STX_ADAM},
    {"sru", "SRU: 8 streams of 1536 units, 256 steps, dropout, SGD", sru_create, 8, 256, 256, 1,
     STX_SGD},
    {"sru++", "SRU++: 8 streams of 1024 units, 256 steps, one head of 256, RAdam", sru_pp_create, 8,
     256, 256, 1, STX_RADAM},
};

enum { MODELS = sizeof models / sizeof *models };


// >>steps

/* Draws ids of which small ones are frequent. */
static void draw(int32_t *ids, size_t n, size_t vocab, uint64_t stream) {
    size_t i;
    for (i = 0; i < n; i++) {
        uint32_t r[4];
        double u;
        stx_philox(7, stream, i, r);
        u = (double)r[0] / 4294967296.0;
        ids[i] = (int32_t)((double)vocab * u * u * u);
    }
}

static void train(int k) {
    const size_t n = models[k].streams * models[k].tokens;
    int32_t *in = (int32_t *)malloc(n * sizeof *in), *out = (int32_t *)malloc(n * sizeof *out);
    stx_optim_desc od;
    stx_optim *optim;
    stx_desc d;
    stx_ctx *x;
    stx_lm lm;
    void *state;
    int s;
    memset(&d, 0, sizeof d);
    memset(&od, 0, sizeof od);
    d.device = STX_CUDA;
    d.precision = STX_PREC_BF16;
    x = stx_create(&d);
    if (!x || !in || !out) exit(1);
    check(x);
    lm = models[k].create(x);
    check(x);
    od.kind = models[k].optimiser;
    od.clip = 1;
    optim = stx_optim_create(lm.params, &od);
    state = lm.state_create(lm.model, models[k].streams, 0);
    for (s = 0; s < models[k].steps; s++) {
        stx_tensor *loss;
        draw(in, n, models[k].vocab, (uint64_t)(2 * s));
        draw(out, n, models[k].vocab, (uint64_t)(2 * s + 1));
        stx_cuda_sync(x);
        ptx_launches_restart();
        stx_begin(x, STX_TRAIN);
        loss = lm.loss(lm.model, stx_tokens(x, in, models[k].streams, models[k].tokens),
                       stx_tokens(x, out, models[k].streams, models[k].tokens), state, state);
        stx_metric_set(x, 0, loss, 1, 0);
        stx_backward(x, lm.total(lm.model, loss));
        stx_optim_step(optim, 1e-3);
        lm.updated(lm.model);
        stx_metric_get(x, 0);
        check(x);
    }
    printf("%s, %zu streams of %zu tokens\n", models[k].what, models[k].streams, models[k].tokens);
    exit(0);
}

int main(int argc, char **argv) {
    int k;
    for (k = 0; k < MODELS; k++) {
        if (argc == 1) printf("%s\n", models[k].name);
        else if (!strcmp(argv[1], models[k].name)) train(k);
    }
    if (argc == 1) return 0;
    fprintf(stderr, "step_cuda: unknown model %s; expected one of:", argv[1]);
    for (k = 0; k < MODELS; k++) fprintf(stderr, " %s", models[k].name);
    fprintf(stderr, "\n");
    return 2;
}
