#pragma once
#include "base.h"
#include "options.h"
#include "options_help.h"
#include "terminal.h"
#include "signals.h"
#include "lm.h"


// >>lm: ranks

/* Returns the number of ranks. In a rehearsal, this is the number of ranks of the real
   run. */
TR_DEF int tr_lm_ranks(const tr_lm *t) {
    return t->rehearsal ? t->rehearsal : stx_ranks(t->x);
}

/* Returns the signal that stops the run, or 0. Several ranks stop at a signal on which
   they have agreed. A single process stops at the signal that it received. */
TR_DEF int tr_lm_stop(const tr_lm *t) {
    return tr_lm_ranks(t) > 1 ? t->agreed : tr_stop_requested();
}

/* Replaces the n values of v by their sums over all ranks, and informs all ranks of a
   signal that any rank received. Collective. Returns 0 on an error of the group. */
TR_DEF int tr_lm_agree(tr_lm *t, double *v, size_t n) {
    double sig = tr_stop_requested();
    if (tr_lm_ranks(t) < 2) return 1;
    if (!stx_group_sum(t->x, v, n) || !stx_group_max(t->x, &sig, 1)) return 0;
    t->agreed = (int)sig;
    return 1;
}

/* Prints why the program ends, and returns `code`. With several ranks, the message
   names the rank and the host, and the other ranks are aborted. Because bad input
   usually affects all ranks, the other ranks first wait 3 s for rank 0 to report it. */
TR_DEF int tr_lm_end(const tr_lm *t, const char *why, int code) {
    char host[256] = "", message[TR_ERR + 256];
    if (t->start.ranks < 2) {
        snprintf(message, sizeof message, "%s: %s", t->options->program, why);
        tr_fold(message, tr_columns(2));
        fprintf(stderr, "%s\n", message);
        return code;
    }

#ifndef _WIN32
    gethostname(host, sizeof host - 1);
    /* rank 0 normally reports the error; mpirun then ends this rank within a second or
       so */
    if (t->start.rank > 0) {
        struct timespec time = {3, 0};
        nanosleep(&time, NULL);
    }
#endif
    fprintf(stderr, "%s: rank %d of %d, on %s: %s\n", t->options->program, t->start.rank,
            t->start.ranks, host, why);
    fflush(stderr);
    stx_group_abort(t->x, code);
    return code;
}

/* Nonzero if text for standard output was lost: the exit code is then 1, whatever the
   program was printing. */
TR_DEF int tr_lm_lost(const tr_lm *t) {
    return t->lost || ferror(stdout);
}

/* Prints t->err and returns the exit code: 2 for invalid input, or 1 if output was
   lost. */
TR_DEF int tr_lm_refuse(const tr_lm *t) {
    return tr_lm_end(t, t->err, tr_lm_lost(t) ? 1 : 2);
}


// >>lm: errors of the library, in terms of the options

/* A phrase in the library's error messages, and its replacement in terms of the
   options. */
typedef struct tr_word {
    const char *from, *to;
} tr_word;

/* Copies text to `out` and replaces each `from` by its `to`. Skips entries whose `to` is
   the name of an option: only tr_lm_why_in applies them. `words` ends with a NULL entry.
   Of two entries with a common beginning, the longer one must come first. Returns the
   length of `out`. */
TR_DEF size_t tr_lm_reword(const tr_lm *t, char *out, size_t size, const char *text,
                           const tr_word *words) {
    const tr_word *w;
    size_t at = 0;
    while (*text && at + 1 < size) {
        for (w = words; w->from; w++)
            if (!strncmp(text, w->from, strlen(w->from))
                && !tr_find_option(t->options, w->to, strlen(w->to)))
                break;
        if (!w->from) {
            out[at++] = *text++;
            continue;
        }
        text += strlen(w->from);
        at += (size_t)snprintf(out + at, size - at, "%s", w->to);
    }
    if (at >= size) at = size - 1;
    out[at] = 0;
    return at;
}

/* Writes the context's error to t->err, in terms of the options. Returns 0. */
TR_DEF int tr_lm_why(tr_lm *t) {
    static const tr_word words[] = {
        {"raise desc.max_bytes", "raise it"},
        {"gpu: expected", "--gpu: expected"},
        {"the text to encode: ", ""},
        {"with min_count (--min-count) 2", "with --min-count 2"},
        {"or without compact", "or with --tokens bytes"},
        {"use STX_CPU, or define SEQTX_CUDA and link seqtx_cuda.cu",
            "use --device cpu, or a trainer made by make cuda"},
        {"device: this build does not support device 1", "this build does not support CUDA"},
        {"precision: this build does not support precision 1",
            "this build does not support bf16"},
        {"STX_PREC_F32", "--precision f32"},
        {" or STX_PREC_BF16", ""},
        {"weight_decay: STX_ADAGRAD has no weight decay: set it to 0 or use STX_ADAMW",
            "--optim adagrad has no --weight-decay: set it to 0, or use --optim adamw"},
        {NULL, NULL}
    };
    char text[TR_ERR];
    const char *message = text;
    int code = stx_error_code(t->x), creating;
    tr_lm_reword(t, text, sizeof text, stx_error(t->x), words);
    creating = !strncmp(text, "stx_create: ", 12);
    if (creating) message += 12;
    else if (!strncmp(text, "stx_optim_create: ", 18)) message += 18;

    if (code == STX_ERR_DEVICE && creating)
        return tr_fail(t->err, TR_ERR, "--device %s --precision %s: %s",
                       t->opt->device ? "cuda" : "cpu", t->opt->precision ? "bf16" : "f32",
                       message);
    return tr_fail(t->err, TR_ERR, "%s%s", code == STX_ERR_MEMORY ? "--max-memory: " : "",
                   message);
}

/* For an option with named values (a choice or a flag), writes the name of a value to
   `out`. */
TR_DEF void tr_value_name(const tr_opt *o, int value, char *out, size_t size) {
    size_t len = 0;
    const char *name = NULL;
    if (o->type == TR_T_FLAG) {
        snprintf(out, size, "%s", value ? "on" : "off");
        return;
    }
    if (value >= 0) name = tr_choice(o->choices, value, &len);
    snprintf(out, size, "%.*s", name ? (int)len : 0, name ? name : "");
}

/* Returns the option that a message of the library is about, or NULL. The message begins
   with the name of a field, whose length is stored in *len. The option is the one to
   which `words` maps the field, or else the one with the same name. */
TR_DEF const tr_opt *tr_lm_field(const tr_lm *t, const char *text, const tr_word *words,
                                 size_t *len) {
    const tr_word *w;
    size_t n = strcspn(text, " :");
    for (w = words; w->from; w++) {
        const tr_opt *o = tr_find_option(t->options, w->to, strlen(w->to));
        int same;
        if (!o) continue;
        *len = strlen(w->from);
        if (strchr(w->from, ' ')) same = !strncmp(text, w->from, *len);
        else same = tr_same_name(text, n, w->from);
        if (same) return o;
    }
    *len = n;
    return tr_find_option(t->options, text, n);
}

/* Reports the library's error in terms of the options. The error has the form "WHO
   FIELD: expected Y, got X" (stx_bad_value). FIELD is replaced by the option that
   tr_lm_field finds. If the option's values have names, X is printed by name, and so is
   the 0 in "expected 0". Other phrases are replaced as in tr_lm_reword. */
TR_DEF int tr_lm_why_in(tr_lm *t, const char *who, const tr_word *words) {
    const char *text = stx_error(t->x), *got, *zero;
    char line[TR_ERR], part[TR_ERR], value_name[64];
    const tr_opt *o;
    size_t n, at;
    int value;
    if (stx_error_code(t->x) != STX_ERR_ARG || strncmp(text, who, strlen(who)) != 0)
        return tr_lm_why(t);

    /* the option's name */
    text += strlen(who);
    o = tr_lm_field(t, text, words, &n);
    if (!o) {
        tr_lm_reword(t, line, sizeof line, text, words);
        return tr_fail(t->err, TR_ERR, "%s", line);
    }
    text += n;
    at = (size_t)snprintf(line, sizeof line, "--%s", o->name);

    /* replace the value and an expected 0 by names */
    got = strstr(text, ", got ");
    if (got && (o->type == TR_T_CHOICE || o->type == TR_T_FLAG)
        && sscanf(got, ", got %d", &value) == 1) {
        zero = strstr(text, ": expected 0");
        if (zero && zero < got && (zero[12] == ' ' || zero[12] == ',')) {
            tr_value_name(o, 0, value_name, sizeof value_name);
            snprintf(part, sizeof part, "%.*s", (int)(zero - text), text);
            at += tr_lm_reword(t, line + at, sizeof line - at, part, words);
            at += (size_t)snprintf(line + at, sizeof line - at, ": expected %s", value_name);
            text = zero + 12;
        }
        snprintf(part, sizeof part, "%.*s", (int)(got - text), text);
        if (at < sizeof line) at += tr_lm_reword(t, line + at, sizeof line - at, part, words);
        tr_value_name(o, value, value_name, sizeof value_name);
        snprintf(part, sizeof part, ", got %s", value_name);
        text = part;
    }
    if (at < sizeof line) tr_lm_reword(t, line + at, sizeof line - at, text, words);
    return tr_fail(t->err, TR_ERR, "%s", line);
}
