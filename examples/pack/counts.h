/* pack/counts.h - statistics of texts: which decisions followed the same context, and
   where the same tokens occurred before.

   A token is `depth` binary decisions, the bits of its id, the highest first. In each
   of CONTEXTS contexts (the last 1, 2, 3, 4 and 6 tokens, and the word so far), a table
   has a group of slots for each 4 decisions of the next token; contexts find it by
   hashing. The text itself is kept, too: a match is an earlier place where the same
   LEAST or more tokens precede, and predicts the token after it. All of this is
   integers. */
#pragma once
#include "base.h"

/* These numbers are part of the format. LEAST: tokens of the shortest match. */
enum { CONTEXTS = 6, LEAST = 6 };

/* What is counted in one context of a table: a slot for each of the 15 nodes of a tree of
   4 decisions. A slot has a probability of 12 bits and, in its low 4 bits, how many
   decisions it has seen; 0 is 1/2, after none. */
typedef struct group {
    uint16_t tag, slot[15];
} group;

typedef struct table {
    group *groups;                      /* (CONTEXTS, 2^bits) */
    uint32_t *after;                    /* (2^after_bits): the position after each hash of
                                           LEAST tokens */
    int bits, after_bits;
} table;

/* All tokens: of the dictionary, then of each lane. */
typedef struct texts {
    int32_t *token;                     /* (size) */
    size_t size, known;                 /* known: tokens of the dictionary */
    size_t counted;                     /* how many of them phrases has counted */
    table phrases;                      /* of the dictionary; groups NULL: there is none */
    uint8_t *in_word;                   /* (V): 1: a letter or digit */
    int depth;                          /* 2^depth: at least the number of ids */
} texts;

/* The place in the texts where a lane is. */
typedef struct place {
    size_t begin, end;                  /* the lane's tokens so far */
    uint32_t context[CONTEXTS];         /* hashes */
    size_t match, length;               /* the last `length` tokens are also those before
                                           token[match]; match 0: no match */
} place;

static void table_begin(table *t) {
    memset(t->groups, 0, sizeof *t->groups * CONTEXTS << t->bits);
    memset(t->after, 0, sizeof *t->after << t->after_bits);
}

/* A table for n tokens. */
static void table_create(table *t, size_t n) {
    for (t->bits = 6; t->bits < 19 && (2 * n - 1) >> t->bits > 0;) t->bits++;
    t->after_bits = t->bits + 1;
    t->groups = (group *)memory(NULL, (size_t)CONTEXTS << t->bits, sizeof *t->groups);
    t->after = (uint32_t *)memory(NULL, (size_t)1 << t->after_bits, sizeof *t->after);
    table_begin(t);
}

static uint32_t hash(uint32_t h, uint32_t v) {
    h = (h + v + 1) * 2654435761u;
    return h ^ h >> 15;
}

/* The next token is part of the text. Sets the contexts of the one after it. */
static void advance(const texts *t, place *l) {
    const int32_t token = t->token[l->end++];
    uint32_t h = 0;
    for (size_t i = 1; i <= 6; i++) {
        h = hash(h, i <= l->end - l->begin ? (uint32_t)t->token[l->end - i] : 0);
        if (i != 5) l->context[STX_MIN(i, 5) - 1] = h;
    }
    l->context[5] = t->in_word[token] ? hash(l->context[5], (uint32_t)token) : 0;
}


// >>slots

/* Returns the group of context i and the decisions so far (node), or NULL; make: replaces
   what another context has there. */
static group *find(const table *t, const place *l, int i, size_t node, int make) {
    const uint64_t key = (l->context[i] + (uint64_t)node * 0x85EBCA6B) * 0x9E3779B97F4A7C15u;
    const uint16_t tag = (uint16_t)(key >> 8 | 1);
    group *g = &t->groups[((size_t)i << t->bits) + (size_t)(key >> (64 - t->bits))];
    if (g->tag == tag) return g;
    if (!make) return NULL;
    memset(g, 0, sizeof *g);
    g->tag = tag;
    return g;
}

/* The slot of a node after b decisions. */
static size_t slot_of(int b, size_t node) {
    const size_t first = (size_t)1 << b % 4;
    return first - 1 + (node & (first - 1));
}

/* The slot moves by 1/2, 1/3, .. 1/17 of the error. */
static void learn_slot(uint16_t *slot, int bit) {
    static const int32_t part[16] = {32768, 21845, 16384, 13107, 10922, 9362, 8192, 7281,
                                     6553, 5957, 5461, 5041, 4681, 4369, 4096, 3855};
    const int32_t v = *slot ^ 0x8000, n = v & 15, P = v >> 4;
    const int32_t now = P + (bit ? (4095 - P) * part[n] / 65536 : -(P * part[n] / 65536));
    *slot = (uint16_t)((now << 4 | STX_MIN(n + 1, 15)) ^ 0x8000);
}

/* Counts token[l->end .. to) in the table of the dictionary, context i alone. */
static void count(const texts *t, place *l, size_t to, int i) {
    while (l->end < to) {
        const size_t id = (size_t)t->token[l->end];
        group *g = NULL;
        for (int b = 0; b < t->depth; b++) {
            const size_t node = (id | (size_t)1 << t->depth) >> (t->depth - b);
            if (b % 4 == 0) g = find(&t->phrases, l, i, node, 1);
            learn_slot(&g->slot[slot_of(b, node)], id >> (t->depth - 1 - b) & 1);
        }
        advance(t, l);
    }
}


// >>matches

static uint32_t *after(const texts *t, const table *in, size_t end) {
    uint32_t key = 0;
    for (size_t i = 1; i <= LEAST; i++) key = hash(key, (uint32_t)t->token[end - i]);
    return &in->after[key * 2654435761u >> (32 - in->after_bits)];
}

/* Takes the match that ends before token[at], if it is long enough. */
static void try_match(const texts *t, place *l, size_t at) {
    size_t n = 0;
    const size_t most = STX_MIN(STX_MIN(at, l->end - l->begin), 32);
    while (n < most && t->token[at - 1 - n] == t->token[l->end - 1 - n]) n++;
    if (n < LEAST) return;
    l->match = at;
    l->length = n;
}

/* Continues the match with the last token, or looks for another. */
static void match_next(const texts *t, place *l, const table *own) {
    if (l->match) {
        const int hit = t->token[l->match++] == t->token[l->end - 1];
        l->length++;
        if (!hit || l->match == t->known || l->match == t->size) l->match = l->length = 0;
    }
    if (l->end - l->begin < LEAST) return;
    uint32_t *last = after(t, own, l->end);
    if (!l->length) try_match(t, l, *last);
    if (!l->length && t->phrases.groups) try_match(t, l, *after(t, &t->phrases, l->end));
    *last = (uint32_t)l->end;
}
