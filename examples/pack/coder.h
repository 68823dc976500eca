/* pack/coder.h - the range coder: it writes a symbol of probability p in -log2 p bits,
   and reads it again.

   What is written is one long binary fraction in the interval [low, low + range), of
   which each symbol takes a part in proportion to its probability. `low` has 56 bits;
   the bytes above them are already written, and a carry increments them. When unpacking,
   low is the fraction less the lower end of the interval. A symbol has the part [from,
   from + size) of `total`, at most 2^42; the last symbol also gets the remainder of the
   division. */
#pragma once
#include "base.h"

enum { BITS = 56 };

typedef struct coder {
    int unpacking;
    uint64_t low, range;
    const unsigned char *from;          /* (from_size): unpacking: packed bytes */
    size_t from_size, at;               /* at: how many of them are read */
    bytes to;                           /* packing: packed bytes */
} coder;

static uint64_t next_byte(coder *c) { return c->at < c->from_size ? c->from[c->at++] : 0; }

/* from: the packed bytes, or NULL when packing. */
static void coder_begin(coder *c, const unsigned char *from, size_t from_size) {
    memset(c, 0, sizeof *c);
    c->unpacking = from != NULL;
    c->from = from;
    c->from_size = from_size;
    c->range = (uint64_t)1 << BITS;
    for (int i = 0; c->unpacking && i < BITS / 8; i++) c->low = c->low << 8 | next_byte(c);
}

/* Returns a number of the next symbol's part of `total`. */
static uint64_t decode(const coder *c, uint64_t total) {
    const uint64_t v = c->low / (c->range / total);
    return STX_MIN(v, total - 1);
}

/* Reduces the interval to the symbol's part, and writes or reads the bytes that are then
   known. */
static void code_part(coder *c, uint64_t from, uint64_t size, uint64_t total) {
    const uint64_t unit = c->range / total, mask = ((uint64_t)1 << BITS) - 1;
    bytes *to = &c->to;
    c->low += c->unpacking ? 0 - unit * from : unit * from;
    c->range = from + size < total ? unit * size : c->range - unit * from;
    if (c->low > mask)
        for (size_t i = to->n; i-- > 0 && ++to->p[i] == 0;) {}
    for (c->low &= mask; c->range >> (BITS - 8) == 0; c->range <<= 8) {
        if (!c->unpacking) put_byte(to, (unsigned)(c->low >> (BITS - 8)));
        c->low = (c->low << 8 & mask) | (c->unpacking ? next_byte(c) : 0);
    }
}

/* Writes the shortest number in the interval. The decoder reads zeros after it. */
static void encode_end(coder *c) {
    bytes *to = &c->to;
    c->low += ((uint64_t)1 << (BITS - 8)) - 1;
    code_part(c, 0, 1, 1);
    put_byte(to, (unsigned)(c->low >> (BITS - 8)));
    while (to->n && to->p[to->n - 1] == 0) to->n--;
}
