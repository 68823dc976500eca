#pragma once
#include "base.h"
#include "buffer.h"
#include "options.h"
#include "files.h"
#include "terminal.h"
#include "lm.h"
#include "lm_sample.h"


// >>lm: --generate

/* Returns a random seed that is short enough to type. */
TR_DEF uint64_t tr_lm_random_seed(void) {
    uint64_t v = (uint64_t)time(NULL) * 1000003u + (uint64_t)getpid();
    FILE *f = fopen("/dev/urandom", "rb");
    if (f) {
        if (fread(&v, sizeof v, 1, f) != 1) v ^= (uint64_t)(tr_seconds() * 1e9);
        fclose(f);
    }
    return v % 1000000000;
}

/* Returns the seed of the draws: --seed if it was given, otherwise a random seed, which
   is also printed. */
TR_DEF uint64_t tr_lm_sampling_seed(tr_lm *t) {
    uint64_t seed = t->opt->seed;
    if (tr_given(t->options, "seed")) return seed;
    seed = tr_lm_random_seed();
    if (t->opt->temperature > 0)
        tr_say(&t->term, "--- sampled with --seed %llu", (unsigned long long)seed);
    return seed;
}

/* Returns the length of the first word, character or byte of text, depending on the kind
   of the vocabulary, or 1 for a space between words. */
TR_DEF size_t tr_lm_unit_length(const tr_lm *t, const char *text, size_t len) {
    static const char space[] = " \t\r\n\v\f";      /* a zero byte also counts as a space */
    const int kind = stx_vocab_kind(t->vocab);
    uint32_t c;
    size_t n = 0;
    if (kind == STX_TOK_WORDS)
        while (n < len && !memchr(space, text[n], sizeof space)) n++;
    else if (kind != STX_TOK_BYTES)
        n = stx_utf8(text, len, &c);
    return n == 0 ? 1 : n;
}

/* Reports up to eight words or characters of a text that were encoded as <unk>. */
TR_DEF void tr_lm_report_unknown(tr_lm *t, const char *text, size_t len) {
    const int words = stx_vocab_kind(t->vocab) == STX_TOK_WORDS;
    const int32_t unk = stx_vocab_unk(t->vocab);
    size_t at, n, m, i, named = 0, more = 0;
    char line[600] = "", quoted[STX_QUOTE];
    int32_t ids[8];
    for (at = 0; at < len; at += n) {
        n = tr_lm_unit_length(t, text + at, len - at);
        if (words && n == 1 && memchr(" \t\r\n\v\f", text[at], 7)) continue;
        if (n == 5 && !memcmp(text + at, "<unk>", 5)) continue;
        m = stx_vocab_encode_part(t->vocab, text + at, n, ids, 8);
        if (m == STX_NPOS) return;
        for (i = 0; i < m && i < 8 && ids[i] != unk; i++) {}
        if (i == m || i == 8) continue;
        if (named == 8) {
            more++;
            continue;
        }
        stx_quote(quoted, (const unsigned char *)text + at, n);
        snprintf(line + strlen(line), sizeof line - strlen(line), "%s'%s'",
                 named++ ? ", " : "", quoted);
    }
    if (more) snprintf(line + strlen(line), sizeof line - strlen(line), ", and %zu more", more);
    if (named) tr_say(&t->term, "not in the vocabulary, read as <unk>: %s", line);
}

/* Encodes a text and feeds it to the model. If echo is not NULL, also writes the text
   there. Returns 1; or 0 with the context's error set if the text cannot be encoded, in
   which case nothing is read; or -1 on other errors. */
TR_DEF int tr_gen_read_text(tr_lm *t, tr_gen *g, const char *text, size_t len, FILE *echo) {
    const int numbers = stx_vocab_kind(t->vocab) == STX_TOK_IDS;
    const int32_t unk = stx_vocab_unk(t->vocab);
    const uint64_t before = g->hash;
    size_t n = stx_vocab_encode_part(t->vocab, text, len, NULL, 0), i;
    int32_t *ids;
    int ok;
    if (n == STX_NPOS) return 0;
    if (!n) {
        stx_fail(t->x, STX_ERR_ARG, "the text has no tokens");
        return 0;
    }
    ids = (int32_t *)malloc(n * sizeof *ids);
    if (!ids) {
        stx_fail(t->x, STX_ERR_MEMORY, "out of memory: cannot allocate %zu tokens", n);
        return -1;
    }
    stx_vocab_encode_part(t->vocab, text, len, ids, n);
    for (i = 0; i < n && ids[i] != unk; i++) {}
    if (i < n && !numbers) tr_lm_report_unknown(t, text, len);

    ok = tr_gen_read(t, g, ids, n) ? 1 : -1;
    if (echo && numbers) {
        tr_gen_write(t, g, echo, ids, n);
    } else {
        if (echo) tr_gen_put(g, echo, text, len);
        g->end = text[len - 1];
    }
    g->hash = tr_hash(before, text, len);
    free(ids);
    return ok;
}

/* Returns the token that precedes a text: a newline, or the closest equivalent in the
   vocabulary. */
TR_DEF int32_t tr_lm_start_token(const tr_lm *t) {
    int32_t token = stx_vocab_eos(t->vocab);
    if (token < 0) token = stx_vocab_find(t->vocab, "\n", 1);
    if (token < 0) token = stx_vocab_find(t->vocab, "\xe2\x96\x81.", 4);
    return token < 0 ? 0 : token;
}

/* Writes the prompt, --generate tokens and a final newline to standard output. The draws
   depend on --seed and on the prompt, because with identical draws, texts from different
   prompts would converge. */
TR_DEF int tr_lm_generate(tr_lm *t) {
    uint64_t seed = tr_lm_sampling_seed(t);
    int32_t token;
    tr_gen g;
    int ok = tr_gen_open(t, &g);
    if (ok && t->prompt_len) {
        ok = tr_gen_read_text(t, &g, t->prompt, t->prompt_len, stdout) > 0;
        seed ^= g.hash;
        if (stx_vocab_kind(t->vocab) == STX_TOK_WORDS) tr_gen_put(&g, stdout, " ", 1);
    } else if (ok) {
        token = tr_lm_start_token(t);
        ok = tr_gen_read(t, &g, &token, 1);
    }
    if (ok) tr_gen_draw(t, &g, t->opt->generate, seed, stdout, t->stop);
    if (ok && g.end != '\n') tr_gen_put(&g, stdout, "\n", 1);
    ok = tr_gen_check(t, &g) && ok;
    tr_gen_close(t, &g);
    return ok;
}

#define TR_LM_OUT "model.safetensors"      /* the checkpoint in --out */

/* Nonzero if the command line requests text from a checkpoint that exists, and has no
   option for anything else: the run then only generates, as with --no-train. */
TR_DEF int tr_lm_only_generates(tr_lm *t) {
    static const char *const of_texts = "checkpoint|out|generate|prompt|temperature|top-k|top-p|"
        "repetition-penalty|repetition-window|stop|weights|seed|threads|precision|device|gpu|tf32|"
        "no-graph|max-memory";
    const tr_lm_opt *o = t->opt;
    char *path;
    const tr_opt *p;
    struct stat st;
    int found;
    if (!o->generate || t->options->preset_used[0] || !(o->checkpoint || o->out)) return 0;
    for (p = t->options->opt; p->type != TR_T_END; p++)
        if (p->type != TR_T_GROUP && p->from == TR_FROM_ARGS
            && tr_choice_index(of_texts, p->name, strlen(p->name)) < 0)
            return 0;
    path = o->checkpoint ? NULL : tr_path_in(o->out, TR_LM_OUT);
    found = (o->checkpoint || path) && stat(o->checkpoint ? o->checkpoint : path, &st) == 0;
    free(path);
    return found;
}
