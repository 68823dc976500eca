#pragma once
#include "base.h"
#include "buffer.h"
#include "terminal.h"
#include "signals.h"
#include "lm.h"
#include "lm_errors.h"
#include "lm_text.h"
#include "lm_sample.h"
#include "lm_generate.h"


// >>lm: --interactive. The model reads the conversation as it appears on the terminal:
// each line without its newline, the answer, and a newline before the next line. The
// draws of an answer depend on --seed and on all text before it, so --generate gives the
// same answer if that text is its --prompt.

/* Reads one line of standard input without its newline. If the line ends in a backslash,
   a newline replaces the backslash, and the next line is appended. Returns 0 if there is
   no line; *why receives the errno if reading failed before the end of the input. */
TR_DEF int tr_lm_read_line(tr_buf *line, int terminal, int *why) {
    char *text = NULL;
    size_t size = 0;
    ssize_t n;
    int more = 1, any = 0;
    line->n = 0;
    while (more) {
        if (terminal) fputs(any ? ".. " : "> ", stderr);
        do {
            clearerr(stdin);
            n = tr_stop_requested() ? -1 : getline(&text, &size, stdin);
            *why = errno;
        } while (n < 0 && ferror(stdin) && *why == EINTR && !tr_stop_requested());
        if (n < 0) break;
        any = 1;
        if (n > 0 && text[n - 1] == '\n') n--;
        if (n > 0 && text[n - 1] == '\r') n--;
        more = n > 0 && text[n - 1] == '\\';
        if (more) text[n - 1] = '\n';
        tr_buf_put(line, text, (size_t)n);
    }
    free(text);
    return any && !tr_stop_requested();
}

/* Nonzero if the line consists of this command. */
TR_DEF int tr_lm_is_command(const tr_buf *line, const char *command) {
    return line->n == strlen(command) && !memcmp(line->s, command, line->n);
}

/* Nonzero if the line is a slash and a word of letters, which is a command. */
TR_DEF int tr_lm_looks_like_command(const tr_buf *line) {
    size_t i = 1;
    if (line->n < 2 || line->s[0] != '/') return 0;
    while (i < line->n && line->s[i] >= 'a' && line->s[i] <= 'z') i++;
    return i == line->n;
}

TR_DEF void tr_lm_talk_help(void) {
    fputs("The model continues each line of text. A line that ends in a backslash\n"
          "continues on the next line.\n"
          "An empty line or /reset starts a new conversation. /help prints this text.\n"
          "Other lines of a slash and a word are refused; with a space before it, such a\n"
          "line is text.\n"
          "Ctrl-C stops an answer; twice, or at the prompt, it ends the program.\n"
          "Ctrl-D ends the program.\n", stderr);
}

/* Starts a conversation, which begins with --prompt. Returns 0 on error. */
TR_DEF int tr_lm_talk_begin(tr_lm *t, tr_gen *g) {
    tr_gen_reset(t, g);
    return !t->prompt_len || tr_gen_read_text(t, g, t->prompt, t->prompt_len, NULL) > 0;
}

/* Feeds a line to the model, preceded by a newline if next is 1, and writes the answer.
   Returns 1; or 0 if the line cannot be encoded, which is reported; or -1 on other
   errors. */
TR_DEF int tr_lm_answer(tr_lm *t, tr_gen *g, const tr_buf *line, int next, uint64_t seed) {
    const uint64_t n = t->opt->generate ? t->opt->generate : 256;
    tr_buf text;
    int ok;
    memset(&text, 0, sizeof text);
    if (next) tr_buf_puts(&text, "\n");
    tr_buf_put(&text, line->s, line->n);
    if (text.oom || line->oom) {
        stx_fail(t->x, STX_ERR_MEMORY, "out of memory: cannot store a line");
        ok = -1;
    } else {
        ok = tr_gen_read_text(t, g, text.s, text.n, NULL);
    }
    tr_buf_free(&text);
    if (ok < 0) return -1;
    if (!ok) {
        tr_lm_why(t);
        stx_clear_error(t->x);
        tr_say(&t->term, "%s: %.1000s; the line is ignored", t->options->program, t->err);
        return 0;
    }

    seed ^= g->hash;
    if (stx_vocab_kind(t->vocab) == STX_TOK_WORDS && !strchr(" \t\n", g->end)) {
        g->hash = tr_hash(g->hash, " ", 1);
        g->end = ' ';
    }
    tr_gen_draw(t, g, n, seed, stdout, t->stop);
    if (g->end != '\n') tr_gen_put(g, stdout, "\n", 1);
    return tr_gen_check(t, g) ? 1 : -1;
}

/* Holds a conversation. Returns 1, or 0 with the context's error set. *refused receives
   the number of lines that could not be encoded. */
TR_DEF int tr_lm_talk(tr_lm *t, size_t *refused) {
    const int terminal = isatty(0);
    const uint64_t seed = tr_lm_sampling_seed(t);
    int32_t line_end = -1;
    const size_t n = stx_vocab_encode(t->vocab, "\n", 1, &line_end, 1);
    const int has_line_end = n == 1 && line_end != stx_vocab_unk(t->vocab);
    int why = 0, answer = 0, answered = 0, ok;
    uint64_t lines = 0;
    tr_buf line;
    tr_gen g;
    memset(&line, 0, sizeof line);
    *refused = 0;
    if (n == STX_NPOS) stx_clear_error(t->x);
    if (terminal) tr_say(&t->term, "--- /help explains the commands; Ctrl-D ends the program");

    ok = tr_gen_open(t, &g) && tr_lm_talk_begin(t, &g);
    while (ok && tr_lm_read_line(&line, terminal, &why)) {
        if (!lines++ && line.n) line.n = tr_lm_unmark(t, line.s, line.n);
        if (tr_lm_is_command(&line, "/help")) {
            tr_lm_talk_help();
        } else if (!line.n || tr_lm_is_command(&line, "/reset")) {
            ok = tr_lm_talk_begin(t, &g);
            answered = 0;
            if (terminal) fputs("--- new conversation\n", stderr);
        } else if (tr_lm_looks_like_command(&line)) {
            tr_say(&t->term, "%.40s: unknown command; the commands are /help and /reset", line.s);
            ++*refused;
        } else {
            answer = tr_lm_answer(t, &g, &line, answered && has_line_end && g.end != '\n', seed);
            ok = answer >= 0;
            if (answer) answered = 1;
            else ++*refused;
            /* Ctrl-C ends the answer, not the program */
            if (answer && terminal && tr_stop_requested() == SIGINT) tr_stop_done();
        }
    }
    if (terminal) fputs("\n", stderr);
    if (ok && !feof(stdin) && !tr_stop_requested()) {       /* a read error, or out of memory */
        stx_fail(t->x, STX_ERR_IO, "cannot read standard input: %s", strerror(why));
        ok = 0;
    }
    tr_gen_close(t, &g);
    tr_buf_free(&line);
    return ok;
}
