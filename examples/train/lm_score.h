#pragma once
#include "base.h"
#include "terminal.h"
#include "signals.h"
#include "lm.h"
#include "lm_errors.h"
#include "lm_results.h"
#include "lm_text.h"
#include "lm_evaluate.h"
#include "lm_generate.h"


// >>lm: --score. Every token is scored; the first one follows tr_lm_start_token. With
// --score-by file, the model reads blocks of one stream, as in evaluation. Otherwise, it
// reads token by token, as in generation, because a block has only one mean loss.

typedef struct tr_scorer {
    void           *state;              /* with --score-by file: the memory; otherwise NULL */
    void           *gen;                /* with --score-by file: NULL; otherwise the generator */
    const stx_real *scores;             /* (V): log p of the next token, up to a constant */
    int32_t        *in, *out;           /* with --score-by file: a block of T tokens, `held` of
                                           them filled */
    size_t          T, held;
    double          tokens, nats;       /* sums since the last printed row */
    uint64_t        read, unknown;      /* numbers of tokens read, and of <unk> among them */
} tr_scorer;

/* Checks that the text of --score can be opened. */
TR_DEF int tr_lm_check_score(tr_lm *t) {
    const char *path = t->opt->score;
    struct stat st;
    if (!path || !strcmp(path, "-")) return 1;
    if (access(path, R_OK) || stat(path, &st))
        return tr_fail(t->err, TR_ERR, "--score %s: %s", path, strerror(errno));
    if (!S_ISDIR(st.st_mode)) return 1;
    return tr_fail(t->err, TR_ERR, "--score %s: expected a text file, got a directory", path);
}

/* With --score-by file: evaluates the tokens in the block and empties it. */
TR_DEF int tr_lm_score_block(tr_lm *t, tr_scorer *s) {
    double v[3];
    if (!s->held) return stx_ok(t->x);
    tr_lm_pass_block(t, s->in, s->out, 1, s->held, s->state, v);
    s->tokens += v[2];
    s->nats += v[0];
    s->in[0] = s->out[s->held - 1];
    s->held = 0;
    return stx_ok(t->x);
}

/* Scores one token or, with --score-by file, adds it to the block. Returns 0 on error. */
TR_DEF int tr_lm_score_token(tr_lm *t, tr_scorer *s, int32_t id) {
    const size_t V = stx_vocab_size(t->vocab);
    const double counted = tr_lm_counted(t, &id, 1);
    double max = -HUGE_VAL, sum = 0;
    size_t i;
    if (s->state) {
        if (s->held) s->in[s->held] = s->out[s->held - 1];
        s->out[s->held++] = id;
        return s->held < s->T || tr_lm_score_block(t, s);
    }
    for (i = 0; i < V; i++)
        if ((double)s->scores[i] > max) max = (double)s->scores[i];
    for (i = 0; i < V; i++) sum += exp((double)s->scores[i] - max);
    s->tokens += counted;
    s->nats += counted * (max + log(sum) - (double)s->scores[id]);
    s->scores = t->lm.gen_feed(s->gen, &id, 1);
    return s->scores != NULL;
}

/* Begins a text: resets the memory and feeds only the token of tr_lm_start_token. */
TR_DEF int tr_lm_score_begin(tr_lm *t, tr_scorer *s) {
    int32_t start = tr_lm_start_token(t);
    if (s->state) {
        s->in[0] = start;
        return 1;
    }
    t->lm.gen_reset(s->gen);
    s->scores = t->lm.gen_feed(s->gen, &start, 1);
    return s->scores != NULL;
}

/* Prints the last columns of a row: tokens, bytes, nats, bits per byte and
   perplexity. */
TR_DEF void tr_lm_score_row(tr_scorer *s, double bytes) {
    printf("%.0f\t%.0f\t%.6f\t%.6f\t%.6f\n", s->tokens, bytes, s->nats,
           bytes > 0 ? s->nats / log(2.0) / bytes : 0,
           s->tokens > 0 ? exp(s->nats / s->tokens) : 1);
    s->tokens = s->nats = 0;
}

/* With --score-by tokens: prints the row of one token. In its text, newlines, tabs and
   backslashes are printed as \n, \t and \\, and other control characters in
   hexadecimal, such as \x0d. */
TR_DEF void tr_lm_score_piece(const tr_lm *t, tr_scorer *s, uint64_t line, int32_t id) {
    size_t len = 0, i;
    const char *text = stx_vocab_piece(t->vocab, id, &len);
    if (id == stx_vocab_eos(t->vocab)) {
        text = "\n";
        len = 1;
    }
    printf("%llu\t%.6f\t", (unsigned long long)line, s->nats);
    for (i = 0; text && i < len; i++) {
        int c = (unsigned char)text[i];
        if (c == '\n') fputs("\\n", stdout);
        else if (c == '\t') fputs("\\t", stdout);
        else if (c == '\\') fputs("\\\\", stdout);
        else if (c < 32 || c == 127) printf("\\x%02x", (unsigned)c);
        else putchar(c);
    }
    putchar('\n');
    s->tokens = s->nats = 0;
}

/* Scores one line, including its newline. *bytes receives the length of its text.
   Returns 0 on error. */
TR_DEF int tr_lm_score_line(tr_lm *t, tr_scorer *s, const char *text, size_t len, uint64_t line,
                            double *bytes) {
    int by = t->opt->score_by, ok = 1;
    size_t n = stx_vocab_encode_part(t->vocab, text, len, NULL, 0), i;
    int32_t *ids = n == STX_NPOS ? NULL : (int32_t *)malloc((n + 1) * sizeof *ids);
    if (!ids) {
        if (stx_ok(t->x))
            stx_fail(t->x, STX_ERR_MEMORY, "out of memory: cannot allocate %zu tokens", n);
        tr_lm_why(t);
        stx_clear_error(t->x);
        stx_fail(t->x, STX_ERR_ARG, "--score %.300s, line %llu: %.600s", t->opt->score,
                 (unsigned long long)line, t->err);
        return 0;
    }
    stx_vocab_encode_part(t->vocab, text, len, ids, n);
    if (stx_vocab_kind(t->vocab) == STX_TOK_IDS) len = stx_vocab_decode(t->vocab, ids, n, NULL, 0);
    *bytes = (double)len - tr_lm_pad_bytes(t, ids, n);
    if (by == TR_BY_TEXTS) ok = tr_lm_score_begin(t, s);
    for (i = 0; ok && i < n && !tr_stop_requested(); i++) {
        s->read++;
        s->unknown += ids[i] == stx_vocab_unk(t->vocab);
        ok = tr_lm_score_token(t, s, ids[i]);
        if (ok && by == TR_BY_TOKENS) tr_lm_score_piece(t, s, line, ids[i]);
    }
    free(ids);
    return ok;
}

/* Appends a newline (\r\n if crlf is 1) to a last line that has none, if the vocabulary
   contains newlines. A text then has the same number of tokens whether it is a separate
   file, a line of a file, or the last line. Returns 0 if memory runs out. */
TR_DEF int tr_lm_score_end(tr_lm *t, char **text, size_t *size, ssize_t *len, int crlf) {
    size_t n = (size_t)*len;
    if ((*text)[n - 1] == '\n') return 1;
    if (stx_vocab_encode(t->vocab, "\n", 1, NULL, 0) == STX_NPOS) {
        stx_clear_error(t->x);
        return 1;
    }
    if (*size < n + 3) {
        char *longer = (char *)realloc(*text, n + 3);
        if (!longer) return 0;
        *text = longer;
        *size = n + 3;
    }
    if (crlf && (*text)[n - 1] != '\r') (*text)[n++] = '\r';
    (*text)[n++] = '\n';
    *len = (ssize_t)n;
    return 1;
}

/* Reads a line including its newline, and removes a byte-order mark from the first
   line. Returns the length, 0 at the end of the text, or -1 on error, for example if a
   line does not fit in memory. */
TR_DEF ssize_t tr_lm_score_next(tr_lm *t, FILE *f, char **text, size_t *size, int *crlf,
                                uint64_t line) {
    ssize_t len = getline(text, size, f);
    int ok = len >= 0 || feof(f);
    if (len > 0 && line == 1) len = (ssize_t)tr_lm_unmark(t, *text, (size_t)len);
    if (len > 0) ok = tr_lm_score_end(t, text, size, &len, *crlf);
    *crlf = len > 1 && (*text)[len - 2] == '\r';
    if (ok) return len > 0 ? len : 0;
    if (!tr_stop_requested())
        stx_fail(t->x, line > 1 ? STX_ERR_ARG : STX_ERR_IO, "--score %s, line %llu: %s",
                 t->opt->score, (unsigned long long)line, strerror(errno));
    return -1;
}

/* Prepares scoring. On failure, sets the context's error and returns 0. tr_lm_score_close
   must be called in both cases. */
TR_DEF int tr_lm_score_open(tr_lm *t, tr_scorer *s) {
    memset(s, 0, sizeof *s);
    s->T = t->eval_block;
    if (t->opt->score_by == TR_BY_FILE)
        s->state = t->lm.state_create(t->lm.model, 1, t->eval_window);
    else
        s->gen = t->lm.gen_create(t->lm.model, 1, t->eval_window);
    s->in = (int32_t *)malloc(2 * s->T * sizeof *s->in);
    s->out = s->in ? s->in + s->T : NULL;
    if (!s->in)
        stx_fail(t->x, STX_ERR_MEMORY, "out of memory: cannot allocate a block of %zu tokens",
                 s->T);
    return stx_ok(t->x);
}

TR_DEF void tr_lm_score_close(tr_lm *t, tr_scorer *s) {
    if (s->gen) t->lm.gen_free(s->gen);
    if (s->state) t->lm.state_free(s->state);
    free(s->in);
}

/* Reads the first bytes of a regular file without moving the file position, and returns
   their number. Returns 0 for any other file. */
TR_DEF size_t tr_peek(FILE *f, char *out, size_t size) {
    struct stat st;
    size_t n;
    off_t at;
    if (fstat(fileno(f), &st) != 0 || !S_ISREG(st.st_mode)) return 0;
    at = ftello(f);
    n = fread(out, 1, size, f);
    return fseeko(f, at, SEEK_SET) == 0 ? n : 0;
}

/* Refuses a text that begins like UTF-16 or UTF-32, unless the tokens are bytes.
   Returns 0 with the context's error set if it is refused. */
TR_DEF int tr_lm_score_encoding(tr_lm *t, const char *text, size_t n) {
    const char *encoding = stx_text_encoding(text, n);
    if (!encoding) return 1;
    if (stx_vocab_kind(t->vocab) != STX_TOK_BYTES) {
        stx_fail(t->x, STX_ERR_FORMAT, "--score %.600s: expected UTF-8, got %s: convert it with "
                 "iconv -f %s -t UTF-8 OLD > NEW", t->opt->score, encoding, encoding);
        return 0;
    }
    tr_say(&t->term, "--score %.1000s: the text is in %s; its bytes are read unchanged",
           t->opt->score, encoding);
    return 1;
}

/* Reads the text and prints the table. Returns 0 on error. */
TR_DEF int tr_lm_score_text(tr_lm *t, tr_scorer *s, FILE *f) {
    static const char *const head[] = {     /* for --score-by file, lines, texts and tokens */
        "tokens\tbytes\tnats\tbpb\tppl", "line\ttokens\tbytes\tnats\tbpb\tppl",
        "line\ttokens\tbytes\tnats\tbpb\tppl", "line\tnats\ttext"
    };
    const int by = t->opt->score_by;
    uint64_t line = 0;
    double bytes = 0, all = 0;
    char *text = NULL, first[4096];
    size_t size = 0, peeked = tr_peek(f, first, sizeof first);
    int crlf = 0, ok = tr_lm_score_encoding(t, first, peeked) && tr_lm_score_begin(t, s);
    while (ok && !tr_stop_requested()) {
        ssize_t len = tr_lm_score_next(t, f, &text, &size, &crlf, line + 1);
        if (len < 0) ok = 0;
        else if (!line) puts(head[by]);
        if (len <= 0) break;
        /* in a pipe, only the first line is checked */
        if (!line && !peeked) ok = tr_lm_score_encoding(t, text, (size_t)len);
        ok = ok && tr_lm_score_line(t, s, text, (size_t)len, ++line, &bytes);
        all += bytes;
        if (ok && !tr_stop_requested() && (by == TR_BY_LINES || by == TR_BY_TEXTS)) {
            printf("%llu\t", (unsigned long long)line);
            tr_lm_score_row(s, bytes);
        }
    }
    free(text);
    if (!ok || by != TR_BY_FILE || tr_stop_requested()) return ok;
    if (!tr_lm_score_block(t, s)) return 0;
    tr_lm_score_row(s, all);
    return 1;
}

/* --score: prints the table. On failure, sets the context's error and returns 0. */
TR_DEF int tr_lm_score(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    FILE *f = strcmp(o->score, "-") ? fopen(o->score, "rb") : stdin;
    tr_scorer s;
    if (!f) {
        stx_fail(t->x, STX_ERR_IO, "--score %s: %s", o->score, strerror(errno));
        return 0;
    }
    if (tr_lm_score_open(t, &s)) {
        if (o->score_by != TR_BY_FILE && t->blocks_see_more && t->eval_block > 1)
            tr_say(&t->term, "tokens are read one at a time, as in generation: the rows add up to "
                   "the score of --score-by file with --eval-block-sz 1");
        tr_lm_score_text(t, &s, f);
        if (s.unknown)
            tr_say(&t->term, "%llu of %llu tokens are not in the vocabulary, read as <unk>; their "
                   "scores are those of <unk>, not of the words themselves",
                   (unsigned long long)s.unknown, (unsigned long long)s.read);
        if (fflush(stdout) || ferror(stdout))
            stx_fail(t->x, STX_ERR_IO, "the scores cannot be written: %s", strerror(errno));
    }
    tr_lm_score_close(t, &s);
    if (f != stdin) fclose(f);
    return stx_ok(t->x);
}
