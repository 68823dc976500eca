#pragma once
#include "base.h"
#include "lm.h"


// >>lm: units of results

/* Returns how many of the n tokens have a loss. */
TR_DEF double tr_lm_counted(const tr_lm *t, const int32_t *ids, size_t n) {
    size_t i, m = 0;
    for (i = 0; i < n; i++) m += ids[i] != t->pad_id;
    return (double)m;
}

/* Returns the number of bytes in the padding tokens among the n tokens, without the
   spaces between words. */
TR_DEF double tr_lm_pad_bytes(const tr_lm *t, const int32_t *ids, size_t n) {
    double pads = t->pad_id >= 0 ? (double)n - tr_lm_counted(t, ids, n) : 0;
    size_t bytes;
    if (!(pads > 0)) return 0;
    bytes = stx_vocab_decode(t->vocab, &t->pad_id, 1, NULL, 0);
    if (stx_vocab_kind(t->vocab) == STX_TOK_WORDS && t->pad_id != stx_vocab_eos(t->vocab)) bytes--;
    return pads * (double)bytes;
}

/* Returns the perplexity per word of text `part` (0, 1, 2: training, validation, test).
   nll is the mean loss in nats per token that has a loss. */
TR_DEF double tr_lm_word_ppl(const tr_lm *t, int part, double nll) {
    return exp(nll * t->counts[part].tokens / t->counts[part].words);
}

/* Converts nll, a mean loss in nats, to the run's unit. A perplexity is the
   exponential of the mean loss, not a mean of exponentials. */
TR_DEF double tr_lm_metric(const tr_lm *t, int part, double nll) {
    if (t->unit == TR_PPL) return exp(nll);
    if (t->unit == TR_WORD_PPL) return tr_lm_word_ppl(t, part, nll);
    return nll / log(2.0) * t->counts[part].tokens / t->counts[part].bytes;
}

/* Converts `loss`, a mean training loss in nats, to the run's unit. */
TR_DEF double tr_lm_train_metric(const tr_lm *t, double loss) {
    const tr_lm_counts *c = &t->counts[0];
    return tr_lm_metric(t, 0, t->mean_of_all ? loss * c->all / c->tokens : loss);
}

TR_DEF const char *tr_lm_unit(const tr_lm *t) {
    if (t->unit == TR_BPC) return "bpb";
    return t->unit == TR_PPL ? "ppl" : "word_ppl";
}

/* Returns the number of words that begin in a piece of text. White space separates
   words. *inside is 1 if the preceding text ends inside a word, and is updated for the
   next piece. */
TR_DEF double tr_lm_words_in(const char *s, size_t len, int *inside) {
    double words = 0;
    size_t k;
    for (k = 0; k < len; k++) {
        int in = s[k] != ' ' && (s[k] < '\t' || s[k] > '\r');
        words += in && !*inside;
        *inside = in;
    }
    return words;
}

/* Returns the number of words in a text, for any kind of token. White space separates
   words. If the tokens are words or pieces, a word begins at each token that begins
   with U+2581 (SentencePiece's mark of a new word). If there are no such marks, every
   token except <eos> is a word. */
TR_DEF double tr_lm_word_count(const tr_lm *t, const stx_corpus *text) {
    const int by_token = stx_vocab_kind(t->vocab) >= STX_TOK_WORDS;
    const int32_t eos = stx_vocab_eos(t->vocab);
    size_t n = stx_corpus_size(text), at, i, m, len = 0;
    double words = 0, marked = 0;
    int32_t id[256];
    int inside = 0;
    for (at = 0; at < n; at += m) {
        m = n - at < 256 ? n - at : 256;
        if (!stx_corpus_read(text, at, m, id)) return 0;
        for (i = 0; i < m; i++) {
            const char *s = stx_vocab_piece(t->vocab, id[i], &len);
            if (id[i] == t->pad_id) {
                inside = 0;
            } else if (by_token) {
                words += id[i] != eos;
                marked += len >= 3 && !memcmp(s, "\xe2\x96\x81", 3);
            } else if (id[i] == eos) {
                if (len) inside = 0;
            } else {
                words += tr_lm_words_in(s, len, &inside);
            }
        }
    }
    return marked > 0 ? marked : words;
}

/* Returns the option that makes the model read token by token, or NULL. */
TR_DEF const char *tr_lm_by_token(const tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    if (o->interactive) return "interactive";
    if (o->generate) return "generate";
    return o->score && o->score_by != TR_BY_FILE ? "score-by" : NULL;
}
