#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "loops.h"
#include "platform.h"
#include "context.h"
#include "arena.h"
#include "tensors.h"


// >>parameter groups

/* Reads decimal digits at *s, before `end`, and advances *s past them. Returns the
   number, or SIZE_MAX if there is none or it has more than 9 digits. */
static size_t stx__pattern_number(const char **s, const char *end) {
    const char *p = *s;
    size_t n = 0;
    for (; p < end && *p >= '0' && *p <= '9' && p - *s < 10; p++) n = 10 * n + (size_t)(*p - '0');
    if (p == *s || p - *s == 10) return SIZE_MAX;
    *s = p;
    return n;
}

/* Matches "[A-B]" at *p with the number at *name. `begin` is the beginning of the name: a
   number does not begin in the middle of its digits. Advances both and returns 1, or
   returns 0. */
static int stx__match_range(const char **p, const char *end, const char *begin,
                            const char **name) {
    const char *q = *p + 1, *digits = *name;
    size_t low, high, n;
    if (**p != '[') return 0;
    low = stx__pattern_number(&q, end);
    if (low == SIZE_MAX || q == end || *q != '-') return 0;
    q++;
    high = stx__pattern_number(&q, end);
    if (high == SIZE_MAX || q == end || *q != ']') return 0;
    if (digits > begin && digits[-1] >= '0' && digits[-1] <= '9') return 0;
    n = stx__pattern_number(&digits, digits + strlen(digits));
    if (n == SIZE_MAX || n < low || n > high) return 0;
    *p = q + 1;
    *name = digits;
    return 1;
}

/* Returns 1 if the pattern [p, end) of stx_params_set_rule matches the whole name. */
static int stx__pattern_matches(const char *p, const char *end, const char *name) {
    const char *begin = name, *star = NULL, *retry = NULL;
    for (;;) {
        if (p < end && *p == '*') {
            star = ++p;
            retry = name;
        } else if (p == end && !*name) {
            return 1;
        } else if (p < end && *name && stx__match_range(&p, end, begin, &name)) {
            continue;
        } else if (p < end && *name && (*p == '?' || *p == *name)) {
            p++;
            name++;
        } else {
            if (!star || !*retry) return 0;
            p = star; /* the star takes another character */
            name = ++retry;
        }
    }
}

/* Sets selected[i] for the parameters that `patterns` selects. Returns 1, or sets an
   error and returns 0 if a pattern matches no parameter. */
static int stx__params_select(const stx_params *p, const char *patterns, uint8_t *selected) {
    const char *at = patterns, *end;
    size_t i, found;
    memset(selected, 0, p->count);
    for (;; at = end + 1) {
        const int excludes = *at == '!';
        end = at + strcspn(at, ",");
        for (i = found = 0; i < p->count; i++) {
            if (!stx__pattern_matches(at + excludes, end, p->name[i])) continue;
            selected[i] = !excludes;
            found++;
        }
        if (!found) {
            stx_fail(p->ctx, STX_ERR_ARG,
                     "stx_params_set_rule: pattern \"%.*s\": expected the name of a parameter, "
                     "such as \"%.80s\", or a pattern that matches one; none of the %zu names "
                     "matches",
                     (int)STX_MIN(end - at, 80), at, p->name[0], p->count);
            return 0;
        }
        if (!*end) return 1;
    }
}

/* Adds the fields of `rule` that are not 0 to the rule of parameter i. */
static int stx__param_set_rule(stx_params *p, size_t i, const stx_param_rule *rule) {
    stx_tensor *t = p->tensor[i];
    if (rule->lr > 0) p->rule[i].lr = rule->lr;
    if (rule->weight_decay != 0) p->rule[i].weight_decay = rule->weight_decay;
    if (!rule->freeze || t->needs_grad == (rule->freeze < 0)) return 1;
    p->rule[i].freeze = rule->freeze;
    t->needs_grad = rule->freeze < 0;
    p->grads_count = 0; /* stx_params_grads makes a new block */
    if (t->needs_grad && !t->grad) t->grad = stx__grads_alloc(p->ctx, p->grads_arena, t->size);
    return !t->needs_grad || t->grad;
}

STX_DEF size_t stx_params_set_rule(stx_params *p, const char *patterns,
                                   const stx_param_rule *rule) {
    STX__FP_SCOPE;
    static const char op[] = "stx_params_set_rule";
    stx_ctx *x = p ? p->ctx : NULL;
    uint8_t *selected;
    size_t i, n = 0;
    int ok;
    if (!stx_ok(x)) return 0;
    if (!patterns || !rule || !p->count) {
        stx_fail(x, STX_ERR_ARG, "%s: expected a list with parameters, patterns and a rule, got %s",
                 op, p->count ? "NULL" : "an empty list");
        return 0;
    }
    if (p->in_use) {
        stx_fail(x, STX_ERR_ARG,
                 "%s: an optimiser already uses the parameters: call %s before stx_optim_create",
                 op, op);
        return 0;
    }
    if (rule->freeze < -1 || rule->freeze > 1)
        return (size_t)stx_bad_value(x, op, "freeze", rule->freeze, "0, 1 or -1");
    if (!(rule->lr >= 0 && stx__finite(rule->lr)))
        return (size_t)stx_bad_value(x, op, "lr", rule->lr, "a finite factor of 0 or more");
    if (!((rule->weight_decay >= 0 && stx__finite(rule->weight_decay)) || rule->weight_decay == -1))
        return (size_t)stx_bad_value(x, op, "weight_decay", rule->weight_decay,
                                     "a finite value of 0 or more, or -1 for none");

    selected = (uint8_t *)stx_block(x, p->count);
    ok = selected && stx__params_select(p, patterns, selected);
    for (i = 0; ok && i < p->count; i++) {
        if (!selected[i]) continue;
        ok = stx__param_set_rule(p, i, rule);
        n++;
    }
    stx_block_free(x, selected);
    stx__forget_steps(x);
    return ok ? n : 0;
}
