#pragma once
#include "base.h"
#include "buffer.h"
#include "options_values.h"
#include "lm.h"
#include "lm_errors.h"


// >>lm: parameter groups (--freeze, --lr-of, --no-decay)

/* Nonzero if `item` is in the comma-separated list b. */
TR_DEF int tr_lm_listed(const tr_buf *b, const char *item) {
    const size_t n = strlen(item);
    const char *at = b->s;
    for (; at && *at; at += strcspn(at, ","), at += *at == ',')
        if (strcspn(at, ",") == n && !strncmp(at, item, n)) return 1;
    return 0;
}

/* Appends the names of all parameters to b, separated by commas. Numbers are written as
   *, and names that differ only in numbers are listed once. */
TR_DEF void tr_lm_param_names(const stx_params *p, tr_buf *b) {
    size_t i;
    for (i = 0; i < p->count; i++) {
        char name[128];
        size_t n = 0;
        const char *s = p->name[i];
        while (*s && n + 1 < sizeof name) {
            const size_t digits = strspn(s, "0123456789");
            const int number = digits && (s == p->name[i] || s[-1] == '.');
            name[n++] = number ? '*' : *s;
            s += number ? digits : 1;
        }
        name[n] = 0;
        if (tr_lm_listed(b, name)) continue;
        if (b->n) tr_buf_puts(b, ",");
        tr_buf_puts(b, name);
    }
}

/* Sets the rule of the parameters that the patterns, from the option --name, select. If a
   pattern matches none, or no parameter is selected, sets t->err, which lists the names,
   and returns 0. */
TR_DEF int tr_lm_set_rule(tr_lm *t, const char *name, const char *patterns,
                          const stx_param_rule *rule) {
    const char *quote;
    tr_buf names = {NULL, 0, 0, 0};
    int n;
    if (stx_params_set_rule(t->lm.params, patterns, rule)) return 1;
    if (!stx_ok(t->x) && stx_error_code(t->x) != STX_ERR_ARG) return tr_lm_why(t);

    /* the library's error quotes the pattern */
    quote = strchr(stx_error(t->x), '"');
    patterns = quote ? quote + 1 : patterns;
    n = (int)strcspn(patterns, "\"");
    tr_lm_param_names(t->lm.params, &names);
    tr_fail(t->err, TR_ERR, "--%s: expected patterns that select parameters, got '%.*s'. Their "
            "names, with * for numbers: %.800s%s", name, n < 80 ? n : 80, patterns,
            names.s ? names.s : "", names.n > 800 ? ".." : "");
    tr_buf_free(&names);
    return 0;
}

/* Applies --lr-of. */
TR_DEF int tr_lm_set_lr_of(tr_lm *t) {
    const char *at = t->opt->lr_of, *end;
    for (; at && *at; at = *end ? end + 1 : end) {
        stx_param_rule rule;
        char item[256], *equals;
        memset(&rule, 0, sizeof rule);
        end = at + strcspn(at, ",");
        snprintf(item, sizeof item, "%.*s", (int)(end - at), at);
        equals = strchr(item, '=');
        if (!equals || equals == item || end - at >= (int)sizeof item
            || !tr_read_real(equals + 1, &rule.lr) || !(rule.lr > 0 && rule.lr < 1e6))
            return tr_fail(t->err, TR_ERR, "--lr-of: expected PATTERN=FACTOR with a factor above "
                           "0, such as layers.0.*=0.1, got '%.200s'%s", item,
                           strstr(item, "=0") ? "; use --freeze for parameters that are not trained"
                                              : "");
        *equals = 0;
        if (!tr_lm_set_rule(t, "lr-of", item, &rule)) return 0;
    }
    return 1;
}

/* Applies --no-decay. */
TR_DEF int tr_lm_set_no_decay(tr_lm *t, stx_optim_desc *d) {
    const char *at = t->opt->no_decay, *end;
    stx_param_rule rule;
    tr_buf patterns = {NULL, 0, 0, 0};
    int ok = 1;
    if (!at || !*at) return 1;
    if (!(d->weight_decay > 0))
        return tr_fail(t->err, TR_ERR, "--no-decay has no effect: it applies only to runs with "
                       "--weight-decay");
    for (; *at; at = *end ? end + 1 : end) {
        end = at + strcspn(at, ",");
        if (end - at == 7 && !strncmp(at, "default", 7)) {
            d->decay_matrices = 1;
            continue;
        }
        if (patterns.n) tr_buf_puts(&patterns, ",");
        tr_buf_put(&patterns, at, (size_t)(end - at));
    }
    memset(&rule, 0, sizeof rule);
    rule.weight_decay = -1;
    if (patterns.oom) ok = tr_fail(t->err, TR_ERR, "out of memory: cannot read --no-decay");
    else if (patterns.n) ok = tr_lm_set_rule(t, "no-decay", patterns.s, &rule);
    tr_buf_free(&patterns);
    return ok;
}

/* Applies the options to the parameters and to d, before the optimiser is created. */
TR_DEF int tr_lm_groups(tr_lm *t, stx_optim_desc *d) {
    stx_param_rule rule;
    memset(&rule, 0, sizeof rule);
    rule.freeze = 1;
    if (t->opt->freeze && *t->opt->freeze && !tr_lm_set_rule(t, "freeze", t->opt->freeze, &rule))
        return 0;
    if (!tr_lm_set_lr_of(t) || !tr_lm_set_no_decay(t, d)) return 0;
    if (stx_params_trained_size(t->lm.params)) return 1;
    return tr_fail(t->err, TR_ERR, "--freeze %.200s: no parameter is left to train: exclude some "
                   "with !, as in '*,!layers.0.*'", t->opt->freeze);
}
