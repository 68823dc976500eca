/* par/patterns.h - patterns, which have one letter per block: reading --pattern and
   similar options, the short form such as (sf)4, and the description in words. */
#pragma once
#include "../train/base.h"
#include "../train/buffer.h"
#include "../train/options_values.h"
#include "../train/lm.h"
#include "../../seqtx_par.h"
#include "options.h"


// >>patterns

enum { PATTERN = MAX_BLOCKS + 1 };      /* size of the longest pattern, with its
                                           terminating 0 */

/* Expands --pattern, or another option, to one letter per block for L blocks, or to ""
   for a search. Returns 0 and sets t->err on error. */
TR_DEF int expand(tr_lm *t, const char *option, const char *text, size_t L, char out[PATTERN]) {
    size_t i;
    uint64_t p;
    out[0] = 0;
    if (text && !*text)
        return tr_fail(t->err, TR_ERR,
                       "--%s: expected letters s, f and i, or search, xl or par:5, got ''",
                       option);
    if (!text || !strcmp(text, "search")) return 1;
    if (!strcmp(text, "xl")) {
        for (i = 0; i < L; i++) out[i] = "sf"[i % 2];
        out[L] = 0;
        return 1;
    }
    if (!strncmp(text, "par:", 4)) {
        int valid = tr_read_size(text + 4, &p) && p >= 1 && p <= L;
        if (valid && stx_par_rule(out, PATTERN, L, (size_t)p)) return 1;
        return tr_fail(t->err, TR_ERR,
                       "--%s %.100s: expected par:P (one attention block per P blocks) with P "
                       "from 2 to %zu (--nlayers)", option, text, L);
    }
    if (stx_par_expand(out, PATTERN, text)) return 1;
    return tr_fail(t->err, TR_ERR,
                   "--%s %.200s: expected letters s, f and i, with counts and groups such as "
                   "(sff)4f3, for at most %d blocks; or search, xl or par:5",
                   option, text, (int)MAX_BLOCKS);
}

TR_DEF const char *short_form(const char *pattern, char out[PATTERN]) {
    return stx_par_format(out, PATTERN, pattern) ? out : pattern;
}

/* Appends a description in words of the n characters at p, which are letters and counts
   without groups. */
TR_DEF void run_in_words(tr_buf *out, const char *p, size_t n) {
    const char *end = p + n;
    char word[64], *next;
    while (p < end) {
        const char letter = *p, *name = letter == 's' ? "attention" : "identity";
        unsigned long blocks = 0;
        for (; p < end && *p == letter; p = next) {
            unsigned long times = strtoul(p + 1, &next, 10);
            blocks += next > p + 1 ? times : 1;
        }
        if (letter == 'f') name = "feed-forward";
        snprintf(word, sizeof word, "%lu %s%s", blocks, name, p < end ? ", " : "");
        tr_buf_puts(out, word);
    }
}

/* Describes a pattern in words, such as "5 attention, 1 feed-forward" for s5f. The
   caller frees the text. Returns NULL if memory runs out. */
TR_DEF char *in_words(const char *pattern) {
    char text[PATTERN];
    const char *p = short_form(pattern, text);
    tr_buf out;
    memset(&out, 0, sizeof out);
    while (*p) {
        size_t n = strcspn(p, "(");
        if (n) {
            run_in_words(&out, p, n);
        } else {
            const char *unit = p + 1;
            size_t letters = strcspn(unit, ")");
            p = unit + letters + 1;
            n = strspn(p, "0123456789");
            tr_buf_put(&out, p, n);
            tr_buf_puts(&out, " x (");
            run_in_words(&out, unit, letters);
            tr_buf_puts(&out, ")");
        }
        p += n;
        if (*p) tr_buf_puts(&out, ", ");
    }
    if (out.oom) tr_buf_free(&out);
    return out.s;
}

/* Prints "s5f: 5 attention, 1 feed-forward". */
TR_DEF void print_pattern(FILE *out, const char *pattern) {
    char text[PATTERN], *words = in_words(pattern);
    fprintf(out, "%s%s%s", short_form(pattern, text), words ? ": " : "", words ? words : "");
    free(words);
}
