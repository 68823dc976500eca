/* pack/model.h - the model: opening a checkpoint of any family, its digest, the tokens
   of bytes, and the step from log-probabilities in floats to the integers of the coder.

   The model computes in f32 on the CPU, where the library promises the same bits on
   every processor and with any number of threads. A packed file therefore depends on the
   model alone, which its digest names. */
#pragma once
#include "base.h"
#include "../../seqtx_attn_span.h"
#include "../../seqtx_compressive.h"
#include "../../seqtx_par.h"
#include "../../seqtx_sru.h"
#include "../../seqtx_text.h"

typedef struct model {
    stx_ctx *x;
    stx_lm lm;
    stx_vocab *vocab;
    void *gen;                          /* reads a token per lane: feed */
    const stx_real *scores;             /* (lanes,V): log p of the tokens after them */
    uint64_t digest;                    /* of the weights, vocabulary and dictionary */
    size_t V;
    int32_t byte[256];                  /* the token of each byte, or -1 */
    int escapes, depth;                 /* escapes: 1: some bytes have no token, and an id
                                           V means such a byte. 2^depth >= V + escapes */
} model;

static void check(const model *m) {
    if (!stx_ok(m->x)) die("%s", stx_error(m->x));
}

/* A new model, for --adapt without -m. These numbers are part of the format. */
static void new_model(model *m) {
    stx_sru_lm_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = 256;
    d.dim = 384;
    d.sru.layers = 3;
    d.sru.transform = STX_SRU_ATTENTION;
    d.sru.no_attention = 1;
    d.sru.highway_bias = -1;
    m->lm = stx_sru_as_lm(stx_sru_lm_create(m->x, &d));
    m->vocab = stx_vocab_build(m->x, NULL, NULL, 0, 0);
}

/* path: a checkpoint; NULL: a new model. */
static void model_open(model *m, const char *path, int threads) {
    const stx_family *const families[] = {stx_span_family(), stx_sru_family(), stx_comp_family(),
                                          stx_par_family()};
    stx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.threads = threads;
    m->x = stx_create(&desc);
    if (!m->x) die("out of memory");
    if (!strcmp(stx_backend(m->x), "cblas"))
        die("this build uses a CBLAS, whose results differ between machines: build without it");
    if (path) {
        m->lm = stx_lm_open(m->x, path, families, 4);
        m->vocab = stx_vocab_open(m->x, path);
    } else new_model(m);
    check(m);

    /* the digest of the weights and the vocabulary, not of the whole checkpoint */
    size_t n;
    stx_writer *w = stx_writer_create(m->x);
    stx_model_write(w, m->lm.family, m->lm.model);
    stx_vocab_write(w, m->vocab);
    unsigned char *file = (unsigned char *)stx_writer_bytes(w, &n);
    check(m);
    m->digest = digest(file, n);
    stx_block_free(m->x, file);

    m->V = stx_vocab_size(m->vocab);
    const int kind = stx_vocab_kind(m->vocab);
    if ((kind != STX_TOK_BYTES && kind != STX_TOK_CHARS) || m->V > 1 << 16)
        die("%s: expected a model of bytes or characters, got one of words or pieces; train it "
            "with --tokens bytes", path);
    for (int c = 0; c < 256; c++) {
        const char s = (char)c;
        m->byte[c] = c == '\n' ? stx_vocab_eos(m->vocab) : -1;
        if (m->byte[c] < 0) m->byte[c] = stx_vocab_find(m->vocab, &s, 1);
        m->escapes |= m->byte[c] < 0;
    }
    while ((size_t)1 << m->depth < m->V + (size_t)m->escapes) m->depth++;
}

/* Returns the token at the start of s and sets *len to its bytes; -1: it has none, and
   the next byte is coded as it is. */
static int32_t next_token(const model *m, const unsigned char *s, size_t n, size_t *len) {
    uint32_t c;
    size_t k = 1;
    *len = 1;
    if (*s >= 0x80 && stx_vocab_kind(m->vocab) == STX_TOK_CHARS) {
        int32_t id = (k = stx_utf8(s, n, &c)) ? stx_vocab_find(m->vocab, (const char *)s, k) : -1;
        if (id >= 0) *len = k;
        return id;
    }
    return m->byte[*s];
}

/* Returns (V): 1 for the tokens that are letters or digits. */
static uint8_t *letters(const model *m) {
    uint8_t *is = (uint8_t *)memory(NULL, m->V, 1);
    size_t n;
    for (size_t i = 0; i < m->V; i++) {
        const unsigned c = *(const unsigned char *)stx_vocab_piece(m->vocab, (int32_t)i, &n);
        is[i] = c > 127 || c == '_' || (c | 32) - 'a' < 26 || c - '0' < 10;
    }
    return is;
}

/* The model reads ids, a token per lane. */
static void feed(model *m, const int32_t *ids) {
    m->scores = m->lm.gen_feed(m->gen, ids, 1);
    check(m);
}


// >>probabilities

static uint32_t power[2048];            /* 2^(32 - i / 2048), nearly */

static void fill_powers(void) {
    uint64_t v = 0xFFFFFFFFu;
    for (int i = 0; i < 2048; i++, v = v * 4293513907u >> 32) power[i] = (uint32_t)v;
}

/* Sets the leaves of a tree to about 2^24 p / max p + 1, the escape's to 1/4096 of all,
   and each node above, from 1, to the sum of its children 2 node and 2 node + 1. A
   difference of two floats and its product with a constant are the same on every machine;
   all else is integers. */
static void weights(const model *m, const stx_real *log_p, uint64_t *tree) {
    const float per_nat = 2954.6395f;   /* 2048 / ln 2 */
    const size_t leaves = (size_t)1 << m->depth;
    uint64_t *w = tree + leaves, sum = 0;
    float max = log_p[0];
    for (size_t i = 1; i < m->V; i++) max = log_p[i] > max ? log_p[i] : max;
    for (size_t i = 0; i < m->V; i++) {
        const float d = max - log_p[i];
        const uint32_t u = d < 16.5f ? (uint32_t)(d * per_nat) : 0;
        w[i] = d < 16.5f ? (power[u & 2047] >> (8 + (u >> 11))) + 1 : 1;
        sum += w[i];
    }
    if (m->escapes) w[m->V] = (sum >> 12) + 1;
    for (size_t i = leaves - 1; i > 0; i--) tree[i] = tree[2 * i] + tree[2 * i + 1];
}
