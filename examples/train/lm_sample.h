#pragma once
#include "base.h"
#include "buffer.h"
#include "files.h"
#include "terminal.h"
#include "signals.h"
#include "lm.h"


// >>lm: generating one text, at the end or as a sample during training

/* A text that is being read and generated: the model's memory of the text, and the
   state on which the draws depend. */
typedef struct tr_gen {
    void           *gen;
    const stx_real *logits;     /* logits of the next token; NULL: nothing was read yet */
    int32_t        *recent;     /* the last --repetition-window tokens or, with a window of 0,
                                   each token of the text once */
    uint64_t        added;      /* number of tokens that were added to `recent` */
    unsigned char  *seen;       /* (V) 1: the token occurs in the text */
    stx_real       *work;       /* (V) work space of stx_sample */
    tr_buf          written;    /* for --stop, or if it is written nowhere else: the text of
                                   the current answer so far */
    uint64_t        hash;       /* hash of everything read and written */
    char            end;        /* last byte read or written */
    int             failed;     /* errno of a failed write; 0: none failed */
    double          until;      /* time at which drawing ends; 0: never */
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
    tr_buf_free(&g->written);
    free(g->recent);
    free(g->seen);
    free(g->work);
}

/* Prepares generation. On failure, sets the context's error and returns 0. tr_gen_close
   must be called in both cases. */
TR_DEF int tr_gen_open(tr_lm *t, tr_gen *g) {
    const size_t V = stx_vocab_size(t->vocab), window = (size_t)t->opt->repetition_window;
    memset(g, 0, sizeof *g);
    g->hash = TR_HASH_BEGIN;
    g->end = '\n';
    g->gen = t->lm.gen_create(t->lm.model, 1, t->eval_window);
    g->recent = (int32_t *)malloc((window ? window : V) * sizeof *g->recent);
    g->seen = (unsigned char *)calloc(V, 1);
    g->work = (stx_real *)malloc(V * sizeof *g->work);
    if (!g->recent || !g->seen || !g->work)
        stx_fail(t->x, STX_ERR_MEMORY, "out of memory: cannot sample");
    return g->gen && stx_ok(t->x);
}

/* Resets g to its state before any text was read. */
TR_DEF void tr_gen_reset(tr_lm *t, tr_gen *g) {
    t->lm.gen_reset(g->gen);
    memset(g->seen, 0, stx_vocab_size(t->vocab));
    g->added = 0;
    g->logits = NULL;
    g->written.n = 0;
    g->hash = TR_HASH_BEGIN;
    g->end = '\n';
}

/* Feeds tokens to the model. Returns 0 on error. */
TR_DEF int tr_gen_read(tr_lm *t, tr_gen *g, const int32_t *ids, size_t n) {
    const uint64_t window = t->opt->repetition_window;
    size_t i;
    for (i = 0; i < n; i++) {
        if (!window && g->seen[ids[i]]) continue;
        g->seen[ids[i]] = 1;
        g->recent[window ? g->added % window : g->added] = ids[i];
        g->added++;
    }
    g->logits = t->lm.gen_feed(g->gen, ids, n);
    return g->logits != NULL;
}

/* Writes tokens as text to `to` or, if it is NULL, to g->written. Omits the leading space
   of a piece that begins a line. */
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
        if (to) tr_gen_put(g, to, text + skip, len - skip);
        if (t->stop || !to) tr_buf_put(&g->written, text + skip, len - skip);
        g->hash = tr_hash(g->hash, text + skip, len - skip);
        g->end = text[len - 1];
    }
}

/* Draws up to n tokens. Each token is immediately written (tr_gen_write) and fed to the
   model. Ends early once the text contains `stop`, which may be NULL, or at g->until. */
TR_DEF void tr_gen_draw(tr_lm *t, tr_gen *g, uint64_t n, uint64_t seed, FILE *to,
                        const char *stop) {
    const tr_lm_opt *o = t->opt;
    const uint64_t window = o->repetition_window;
    stx_sampling sampling;
    uint64_t i;
    memset(&sampling, 0, sizeof sampling);
    sampling.temperature = o->temperature;
    sampling.top_k = o->top_k;
    sampling.top_p = o->top_p;
    sampling.seed = seed;
    sampling.repetition_penalty = o->repetition_penalty;
    sampling.recent = g->recent;
    g->written.n = 0;
    for (i = 0; i < n && g->logits && !g->failed && !tr_stop_requested(); i++) {
        const size_t before = g->written.n;
        int32_t token;
        sampling.recent_count = (size_t)(window && g->added > window ? window : g->added);
        token = stx_sample(&sampling, i, g->logits, stx_vocab_size(t->vocab), g->work);
        if (token < 0) {
            stx_fail(t->x, STX_ERR_ARG, "cannot sample: the model's output is not finite");
            break;
        }
        tr_gen_write(t, g, to, &token, 1);
        tr_gen_read(t, g, &token, 1);
        if (stop && tr_stops(&g->written, before, stop)) break;
        if (g->until > 0 && tr_seconds() >= g->until) break;
    }
    if (g->written.oom)
        stx_fail(t->x, STX_ERR_MEMORY, "out of memory: cannot store the generated text");
}
