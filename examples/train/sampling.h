#pragma once
#include "base.h"
#include "buffer.h"


// >>sampling: the repetition penalty and the end of a generated text

/* Counts how often each token occurs among the last `window` tokens, or among all
   tokens if window is 0. */
typedef struct {
    uint32_t *count;                /* [vocab + 1] */
    int32_t  *ring;                 /* [window + 1], the last `window` tokens */
    size_t    vocab, window, n;     /* n: number of tokens so far */
} tr_recent;

TR_DEF int tr_recent_open(tr_recent *r, size_t vocab, size_t window) {
    memset(r, 0, sizeof *r);
    r->vocab = vocab;
    r->window = window;
    r->count = (uint32_t *)calloc(vocab + 1, sizeof *r->count);
    r->ring = (int32_t *)malloc((window + 1) * sizeof *r->ring);
    return r->count != NULL && r->ring != NULL;
}

TR_DEF void tr_recent_close(tr_recent *r) {
    free(r->count);
    free(r->ring);
    memset(r, 0, sizeof *r);
}

TR_DEF void tr_recent_clear(tr_recent *r) {
    memset(r->count, 0, r->vocab * sizeof *r->count);
    r->n = 0;
}

TR_DEF void tr_recent_add(tr_recent *r, int32_t token) {
    if (r->window > 0) {
        size_t at = r->n % r->window;
        if (r->n >= r->window) r->count[r->ring[at]]--;
        r->ring[at] = token;
    }
    r->count[token]++;
    r->n++;
}

/* Applies the repetition penalty of CTRL (arXiv:1909.05858, section 4.1). For each
   token with a count above 0, however large, a positive logit is divided by the
   penalty, and a negative one is multiplied by it. The result depends on the origin of
   the logits, which are defined only up to a constant; log-probabilities, for example,
   are all negative. Therefore the mean is subtracted first. (Training leaves the mean
   of the logits near its initial value of 0, so this hardly changes the logits of a
   plain output head.) */
TR_DEF void tr_penalise(double *x, const tr_recent *r, double penalty) {
    double mean = 0;
    size_t i, n = 0;
    for (i = 0; i < r->vocab; i++) {
        if (!isfinite(x[i])) continue;
        mean += x[i];
        n++;
    }
    if (n > 0) mean /= (double)n;
    for (i = 0; i < r->vocab; i++) {
        x[i] -= mean;
        if (r->count[i] > 0 && isfinite(x[i])) x[i] = x[i] > 0 ? x[i] / penalty : x[i] * penalty;
    }
}

/* Decodes \n, \t and \\ in the value of --stop, in place. */
TR_DEF void tr_unescape(char *s) {
    static const char letter[] = "nt\\", meaning[] = "\n\t\\";
    const char *at;
    char *out = s;
    for (; *s; s++) {
        at = *s == '\\' && s[1] ? strchr(letter, s[1]) : NULL;
        if (at != NULL) s++;
        *out++ = at != NULL ? meaning[at - letter] : *s;
    }
    *out = 0;
}

/* Nonzero if text contains an occurrence of `stop` that ends after the first `seen`
   bytes. */
TR_DEF int tr_stops(const tr_buf *text, size_t seen, const char *stop) {
    size_t k = strlen(stop), at = seen + 1 > k ? seen + 1 - k : 0;
    for (; k > 0 && at + k <= text->n; at++)
        if (memcmp(text->s + at, stop, k) == 0) return 1;
    return 0;
}
