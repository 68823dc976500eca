#pragma once
#include "base.h"
#include "buffer.h"
#include "files.h"
#include "signals.h"
#include "sampling.h"
#include "lm.h"


// >>lm: generating one text, at the end or as a sample during training

/* A text that is being read and generated: the model's memory of the text, and the
   state on which the draws depend. */
typedef struct tr_gen {
    void           *gen;
    const stx_real *logits;     /* logits of the next token; NULL: nothing was read yet */
    tr_recent       recent;     /* recent tokens for --repetition-penalty */
    double         *penalised;  /* (V) */
    stx_real       *work;       /* (2,V): logits to draw from, and work space of stx_sample */
    tr_buf          written;    /* for --stop: the text of the current answer so far */
    uint64_t        hash;       /* hash of everything read and written */
    char            end;        /* last byte read or written */
    int             failed;     /* errno of a failed write; 0: none failed */
} tr_gen;

/* Writes all bytes immediately. stdio would lose bytes if a signal interrupted it. */
TR_DEF void tr_gen_put(tr_gen *g, FILE *to, const void *bytes, size_t n) {
    if (g->failed || (fflush(to) == 0 && tr_write_all(fileno(to), bytes, n))) return;
    g->failed = errno ? errno : EIO;
}

/* Sets an error if generated text was lost. Returns 0 if the context has an error. */
TR_DEF int tr_gen_check(tr_lm *t, const tr_gen *g) {
    if (g->failed) {
        t->lost = 1;
        stx_fail(t->x, STX_ERR_IO, "the generated text cannot be written: %s",
                 strerror(g->failed));
    }
    return stx_ok(t->x);
}

TR_DEF void tr_gen_close(tr_lm *t, tr_gen *g) {
    if (g->gen) t->lm.gen_free(g->gen);
    tr_recent_close(&g->recent);
    tr_buf_free(&g->written);
    free(g->penalised);
    free(g->work);
}

/* Prepares generation. On failure, sets the context's error and returns 0. tr_gen_close
   must be called in both cases. */
TR_DEF int tr_gen_open(tr_lm *t, tr_gen *g) {
    const size_t V = stx_vocab_size(t->vocab);
    int ok;
    memset(g, 0, sizeof *g);
    g->hash = TR_HASH_BEGIN;
    g->end = '\n';
    g->gen = t->lm.gen_create(t->lm.model, 1, t->eval_window);
    g->penalised = (double *)malloc(V * sizeof *g->penalised);
    g->work = (stx_real *)malloc(2 * V * sizeof *g->work);
    ok = tr_recent_open(&g->recent, V, (size_t)t->opt->repetition_window);
    if (!ok || !g->penalised || !g->work)
        stx_fail(t->x, STX_ERR_MEMORY, "out of memory: cannot sample");
    return g->gen && stx_ok(t->x);
}

/* Resets g to its state before any text was read. */
TR_DEF void tr_gen_reset(tr_lm *t, tr_gen *g) {
    t->lm.gen_reset(g->gen);
    tr_recent_clear(&g->recent);
    g->logits = NULL;
    g->written.n = 0;
    g->hash = TR_HASH_BEGIN;
    g->end = '\n';
}

/* Feeds tokens to the model. Returns 0 on error. */
TR_DEF int tr_gen_read(tr_lm *t, tr_gen *g, const int32_t *ids, size_t n) {
    size_t i;
    for (i = 0; i < n; i++) tr_recent_add(&g->recent, ids[i]);
    g->logits = t->lm.gen_feed(g->gen, ids, n);
    return g->logits != NULL;
}

/* Writes tokens as text. Omits the leading space of a piece that begins a line. */
TR_DEF void tr_gen_write(tr_lm *t, tr_gen *g, FILE *to, const int32_t *ids, size_t n) {
    const int pieces = stx_vocab_kind(t->vocab) > STX_TOK_WORDS;
    char text[4096];
    size_t i;
    for (i = 0; i < n; i++) {
        size_t len = stx_vocab_decode(t->vocab, ids + i, 1, text, sizeof text), skip;
        if (len == STX_NPOS) return;
        if (len > sizeof text) len = sizeof text;
        if (!len) continue;
        skip = pieces && *text == ' ' && (g->end == '\n' || g->end == ' ');
        tr_gen_put(g, to, text + skip, len - skip);
        if (t->stop) tr_buf_put(&g->written, text + skip, len - skip);
        g->hash = tr_hash(g->hash, text + skip, len - skip);
        g->end = text[len - 1];
    }
}

/* Returns the logits to draw from, after --repetition-penalty. */
TR_DEF const stx_real *tr_gen_logits(tr_lm *t, tr_gen *g) {
    const size_t V = stx_vocab_size(t->vocab);
    size_t k;
    if (t->opt->repetition_penalty == 1) return g->logits;
    for (k = 0; k < V; k++) g->penalised[k] = (double)g->logits[k];
    tr_penalise(g->penalised, &g->recent, t->opt->repetition_penalty);
    for (k = 0; k < V; k++) g->work[k] = (stx_real)g->penalised[k];
    return g->work;
}

/* Draws up to n tokens. Each token is immediately written and fed to the model. Ends
   early once the text contains `stop`, which may be NULL. */
TR_DEF void tr_gen_draw(tr_lm *t, tr_gen *g, uint64_t n, uint64_t seed, FILE *to,
                        const char *stop) {
    const tr_lm_opt *o = t->opt;
    const size_t V = stx_vocab_size(t->vocab);
    stx_sampling sampling;
    uint64_t i;
    memset(&sampling, 0, sizeof sampling);
    sampling.temperature = o->temperature;
    sampling.top_k = o->top_k;
    sampling.top_p = o->top_p;
    sampling.seed = seed;
    g->written.n = 0;
    for (i = 0; i < n && g->logits && !g->failed && !tr_stop_requested(); i++) {
        const size_t before = g->written.n;
        int32_t token = stx_sample(&sampling, i, tr_gen_logits(t, g), V, g->work + V);
        if (token < 0) {
            stx_fail(t->x, STX_ERR_ARG, "cannot sample: the model's output is not finite");
            break;
        }
        tr_gen_write(t, g, to, &token, 1);
        tr_gen_read(t, g, &token, 1);
        if (stop && tr_stops(&g->written, before, stop)) break;
    }
    if (g->written.oom) stx_fail(t->x, STX_ERR_MEMORY, "out of memory: cannot look for --stop");
}
