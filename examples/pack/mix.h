/* pack/mix.h - codes one token: mixes the model's probability of each of its decisions
   with those that were counted after the same context, in the lane (own) and in the
   dictionary, and that of the token after the longest match.

   The inputs are stretched, ln(p / (1 - p)), their weighted sum is squashed, and the
   weights follow the gradient of the code length: the logistic mixing of M. Mahoney,
   "Data Compression Explained", section 4.3. There are two sets of weights, one chosen
   by the match and the number of the decision, one by the last token; their two sums are
   averaged. A stretched 1 is 256, a probability of 1 is 65536. */
#pragma once
#include "base.h"
#include "coder.h"
#include "counts.h"

/* SETS: sets of weights. MATCHES: states of a match. Both are part of the format. */
enum { INPUTS = 2 * CONTEXTS + 3, SETS = 256, MATCHES = 16 * 3 };
enum { RANGE = 3071, ONE = 65536 };

/* What the mixing learns: the probability that a slot or a match in a certain state is
   worth, and the weights of the inputs. A weight of 65536 is 1. */
typedef struct mixing {
    int speed;                          /* factor of the learning rate of the weights */
    uint16_t slot[2][CONTEXTS][4096], match[MATCHES];
    int32_t weight[2][SETS][INPUTS];
} mixing;

static int32_t squashed[2 * RANGE + 1];
static int16_t stretch[ONE];

static int32_t limit(int64_t v, int32_t least, int32_t most) {
    return (int32_t)STX_MIN(STX_MAX(v, least), most);
}

static int32_t squash(int64_t v) { return squashed[limit(v, -RANGE, RANGE) + RANGE]; }

static void fill_mixing_tables(void) {
    const uint64_t one = (uint64_t)1 << 32;
    uint64_t v = one;
    for (int i = 0; i <= RANGE; i++, v = v * 4278222789u >> 32) {   /* v = 2^32 e^(-i/256) */
        squashed[RANGE + i] = (int32_t)((one << 16) / (one + v));
        squashed[RANGE - i] = ONE - squashed[RANGE + i];
    }
    for (int i = -RANGE, p = 0; p < ONE; stretch[p++] = (int16_t)i)
        while (i < RANGE && squash(i) < p) i++;
}

/* Without a dictionary, records begin with these probabilities and weights. */
static void mixing_begin(mixing *l) {
    l->speed = 1;
    for (int i = 0; i < 2 * CONTEXTS; i++)
        for (int n = 0; n < 16; n++)
            for (int k = 0; k < 256; k++)
                l->slot[i / CONTEXTS][i % CONTEXTS][n << 8 | k] =
                    (uint16_t)(ONE / 2 + (256 * k + 128 - ONE / 2) * (2 * n + 1) / (2 * n + 2));
    for (int i = 0; i < MATCHES; i++) l->match[i] = (uint16_t)(ONE - 1 - ONE / (4 + i / 3 * 4));
    for (int i = 0; i < 2 * SETS * INPUTS; i++)
        l->weight[i / INPUTS / SETS][i / INPUTS % SETS][i % INPUTS] = i % INPUTS ? ONE / 11 : ONE;
}

static void learn_p(uint16_t *P, int bit) {
    *P = (uint16_t)(*P + ((bit ? ONE - 1 : 0) - *P) / 64);
}

/* What the decisions of one token have in common. */
typedef struct inputs {
    int n;                              /* contexts: CONTEXTS, or 2 CONTEXTS */
    group *own[CONTEXTS], *known[CONTEXTS];
    size_t set[2];
    uint16_t *match;                    /* probability that the match is right */
} inputs;

/* Codes or decodes one decision and returns it. P: the model's probability of 1;
   at: the slot; expected: what the match predicts, or -1. */
static int code_bit(mixing *k, coder *c, inputs *in, int32_t P, size_t at, int expected,
                    int bit) {
    int32_t x[INPUTS], part[2];
    uint16_t *worth[2 * CONTEXTS];
    const int n = in->n;
    x[0] = stretch[P];
    for (int i = 0; i < n; i++) {
        const group *g = i < CONTEXTS ? in->own[i] : in->known[i - CONTEXTS];
        const int32_t v = g ? g->slot[at] ^ 0x8000 : 0;
        worth[i] = NULL;
        if (v & 15) worth[i] = &k->slot[i / CONTEXTS][i % CONTEXTS][(v & 15) << 8 | v >> 8];
        x[i + 1] = worth[i] ? stretch[*worth[i]] : 0;
    }
    x[n + 1] = expected < 0 ? 0 : stretch[*in->match];
    if (expected == 0) x[n + 1] = -x[n + 1];
    x[n + 2] = 256;
    int64_t all = 0;
    for (int s = 0; s < 2; s++) {
        int64_t sum = 0;
        for (int i = 0; i < n + 3; i++) sum += (int64_t)x[i] * k->weight[s][in->set[s]][i];
        sum = limit(sum / ONE, -RANGE, RANGE);
        part[s] = squash(sum);
        all += sum;
    }
    P = limit(squash(all / 2), 1, ONE - 1);
    if (c->unpacking) bit = decode(c, ONE) < (uint64_t)P;
    code_part(c, bit ? 0 : (uint64_t)P, (uint64_t)(bit ? P : ONE - P), ONE);

    for (int s = 0; s < 2; s++) {
        const int64_t error = (int64_t)k->speed * (bit * ONE - part[s]);
        for (int i = 0; i < n + 3; i++)
            k->weight[s][in->set[s]][i] += (int32_t)(x[i] * error / 32768);
    }
    for (int i = 0; i < n; i++)
        if (worth[i]) learn_p(worth[i], bit);
    for (int i = 0; i < CONTEXTS; i++) learn_slot(&in->own[i]->slot[at], bit);
    if (expected >= 0) learn_p(in->match, bit == expected);
    return bit;
}

/* Codes or decodes an id below 2^depth. tree (2 * 2^depth): the model's weights of the
   ids and, in each node above, the sum of its children; see weights in model.h. */
static size_t code_id(const texts *t, const table *own, const place *l, mixing *k, coder *c,
                      const uint64_t *tree, size_t id) {
    const size_t leaf = (size_t)1 << t->depth;
    const size_t guess = l->match ? (size_t)t->token[l->match] | leaf : 0;
    const size_t length = l->length < 8 ? l->length : STX_MIN(6 + l->length / 4, 15);
    const size_t state = (l->length > 0) + (l->length > 15) + (l->length > 31);
    const int primed = t->phrases.groups != NULL;
    size_t node = 1;
    inputs in;
    memset(&in, 0, sizeof in);
    in.n = primed ? 2 * CONTEXTS : CONTEXTS;
    in.set[1] = l->end > l->begin ? (size_t)t->token[l->end - 1] % SETS : 0;
    for (int b = 0; b < t->depth; b++) {
        const int left = t->depth - b, agrees = guess >> left == node;
        if (b % 4 == 0)
            for (int i = 0; i < CONTEXTS; i++) {
                in.own[i] = find(own, l, i, node, 1);
                if (primed) in.known[i] = find(&t->phrases, l, i, node, 0);
            }
        if (!tree[2 * node + 1]) {      /* no id begins so */
            node *= 2;
            continue;
        }
        in.set[0] = (agrees ? state : 0) * 17 + (size_t)b;
        in.match = &k->match[length * 3 + (b > 0) + (b > 2)];
        const int32_t P = limit((int64_t)(tree[2 * node + 1] * ONE / tree[node]), 1, ONE - 1);
        const int expected = agrees ? (int)(guess >> (left - 1) & 1) : -1;
        const int bit = id >> (left - 1) & 1;
        node = 2 * node + (size_t)code_bit(k, c, &in, P, slot_of(b, node), expected, bit);
    }
    return node - leaf;
}
