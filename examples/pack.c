/* pack.c - packs a file, or many small records, with a model of any family as the
   statistics of an arithmetic coder. docs/pack.md explains how, and compares.

   Copy it next to seqtx.h, the headers of the families and seqtx_text.h (in the source
   tree, add -I.):
       cc -O3 pack.c -lm -pthread -o pack
       ./pack -m run.safetensors my.txt                   my.txt.pack
       ./pack -d -m run.safetensors my.txt.pack           my.txt again
       ./pack --help

   Reading order: code_part (the coder), weights (from log-probabilities to integers),
   code_bit (mixing), code_id and code_token (one token), code_group (many records in
   lockstep), prime (--dictionary), learn (--adapt), pack_file and unpack_file (the
   format).

   A packed file, with integers as in put_number unless a size is given:

       "stxpack", version      8 bytes
       flags                   FLAG_.. below
       digest of the model     8 bytes
       digest of the content   8 bytes
       lanes, length of the prompt, the prompt, records
       per record: its length less that of the record before; its packed length
       the packed records, in order
       digest of all of this   8 bytes */
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L     /* isatty */
#endif
#define SEQTX_IMPLEMENTATION
#include "seqtx_attn_span.h"
#include "seqtx_compressive.h"
#include "seqtx_par.h"
#include "seqtx_sru.h"
#include "seqtx_text.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifdef _WIN32
#include <io.h>
#define isatty _isatty
#else
#include <unistd.h>
#endif

static const char magic[8] = {'s', 't', 'x', 'p', 'a', 'c', 'k', 2 /* version */};

enum { FLAG_ADAPT = 1, FLAG_NOTHING = 2 /* the model learns from nothing */,
       FLAG_WHOLE = 4 /* the parts of a file, not records */ };

/* --adapt: after every BLOCK tokens of all lanes together, STEPS training steps, each
   with ROWS windows of WINDOW tokens. These numbers are part of the format. */
enum { BLOCK = 512, STEPS = 2, ROWS = 16, WINDOW = 64, MAX_LANES = 4096 };

/* Mixing, see code_bit. CONTEXTS: the last 1, 2, 3, 4 and 6 tokens, and the word so
   far. LEAST: tokens of the shortest match. SETS: sets of weights. */
enum { CONTEXTS = 6, INPUTS = 2 * CONTEXTS + 3, LEAST = 6, SETS = 256,
       MATCHES = 16 * 3, TAIL = 65536, PIECE = 2048 };

typedef struct bytes {
    unsigned char *p;
    size_t n, capacity;
} bytes;

typedef struct record {
    size_t size, index;                 /* size in bytes; index: 0 is the first one */
    const unsigned char *from;          /* (from_size): the record, or its packed bytes */
    size_t from_size;
    bytes to;                           /* its packed bytes, or the record */
} record;

/* What is counted in one context of a table: a slot for each of the 15 nodes of a tree of
   4 decisions. A slot has a probability of 12 bits and, in its low 4 bits, how many
   decisions it has seen; 0 is 1/2, after none. */
typedef struct group {
    uint16_t tag, slot[15];
} group;

/* The statistics of a text: groups, which contexts find by hashing, and the position
   after each hash of LEAST tokens. */
typedef struct table {
    group *groups;                      /* (CONTEXTS, 2^bits) */
    uint32_t *after;                    /* (2^after_bits) */
    int bits, after_bits;
} table;

/* What the mixing learns: the probability that a slot or a match in a certain state is
   worth, and the weights of the inputs. A weight of 65536 is 1. */
typedef struct mixing {
    uint16_t slot[2][CONTEXTS][4096], match[MATCHES];
    int32_t weight[2][SETS][INPUTS];
} mixing;

/* A lane codes one record after the other. The lanes are coded in lockstep: one token of
   each record, then one step of the model for all of them. */
typedef struct lane {
    record *r;                          /* NULL: idle */
    size_t at;                          /* bytes of the record that are coded */
    uint64_t low, range;                /* the coder; unpacking: low is the packed number
                                           less the lower end of the interval */
    size_t code_at;                     /* unpacking: packed bytes that are read */
    int32_t token;                      /* the last token, which the model reads next */
    size_t begin, end;                  /* the tokens of the record so far, in pack.text;
                                           --adapt: of all records of this lane */
    table *own;                         /* statistics of these tokens */
    mixing *learned;
    uint32_t context[CONTEXTS];         /* hashes */
    size_t match, length;               /* the last `length` tokens are also those before
                                           text[match]; match 0: no match */
} lane;

typedef struct options {
    const char *in, *out, *model, *records, *prompt, *dictionary;
    size_t record, lanes;
    int unpack, force, adapt, threads;
} options;

typedef struct pack {
    stx_ctx *x;
    stx_lm lm;
    stx_vocab *vocab;
    stx_optim *optim;                   /* --adapt; otherwise NULL */
    void *state;                        /* of the training steps */
    stx_schedule rate;
    uint64_t digest, expected, updates; /* digest: of the model */
    void *gen;
    int32_t byte[256];                  /* the token of each byte, or -1 */
    size_t V, lanes, total, done;       /* total, done: bytes, for the progress */
    int unpacking, escapes, terminal;   /* escapes: 1: some bytes have no token */
    bytes prompt;
    int32_t *text;                      /* tokens: of the dictionary, then of each lane */
    size_t known, counted, size;        /* tokens of the dictionary; how many of them
                                           phrases has counted; tokens of text */
    size_t tail, tail_byte;             /* where the last tenth of the dictionary begins */
    bytes dictionary;
    table phrases;                      /* of the dictionary; groups NULL: there is none */
    mixing learned;                     /* the state in which a record begins */
    uint8_t *in_word;                   /* (V): 1: a letter or digit */
    int depth, shared, serial;          /* 2^depth >= V + escapes. shared: the lanes have
                                           one table; serial: and learn in order */
    int speed;                          /* factor of the learning rate of the mixing */
    lane *team;                         /* (lanes) */
    int32_t *ids;                       /* (lanes): what the model reads next */
    const stx_real *scores;             /* (lanes,V): log p of the tokens after them */
    uint64_t *tree;                     /* (lanes, 2 * 2^depth): see weights */
    time_t began, shown;
} pack;

static const char *temporary;           /* removed by die */

static void die(const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    fputs("pack: ", stderr);
    vfprintf(stderr, fmt, args);
    fputc('\n', stderr);
    va_end(args);
    if (temporary) remove(temporary);
    exit(1);
}

static void *memory(void *p, size_t n, size_t size) {
    if (size && n > SIZE_MAX / 2 / size) die("out of memory");
    p = realloc(p, n * size + 1);
    if (!p) die("out of memory");
    return p;
}


// >>bytes

static void put(bytes *b, const void *p, size_t n) {
    if (b->capacity - b->n < n) {
        b->capacity = b->n + b->n / 2 + n + 64;
        b->p = (unsigned char *)memory(b->p, b->capacity, 1);
    }
    memcpy(b->p + b->n, p, n);
    b->n += n;
}

static void put_byte(bytes *b, unsigned v) {
    unsigned char c = (unsigned char)v;
    put(b, &c, 1);
}

/* 7 bits per byte, the lowest first; all bytes but the last have bit 7. */
static void put_number(bytes *b, uint64_t v) {
    for (; v > 127; v >>= 7) put_byte(b, (unsigned)(v & 127) | 128);
    put_byte(b, (unsigned)v);
}

static void put_64(bytes *b, uint64_t v) {
    for (int i = 0; i < 8; i++) put_byte(b, (unsigned)(v >> (8 * i)) & 255);
}

static uint64_t get_64(const unsigned char *p) {
    uint64_t v = 0;
    for (int i = 0; i < 8; i++) v |= (uint64_t)p[i] << (8 * i);
    return v;
}

/* Any change of one byte changes the result: each step is a bijection of the key. */
static uint64_t digest(const unsigned char *p, size_t n) {
    uint64_t key = stx_key_add(14695981039346656037u, n);
    for (; n >= 8; n -= 8, p += 8) key = stx_key_add(key, get_64(p));
    for (; n; n--) key = stx_key_add(key, *p++);
    return key;
}

static void read_all(bytes *b, const char *path) {
    static unsigned char part[1 << 16];
    FILE *f = strcmp(path, "-") ? fopen(path, "rb") : stdin;
    size_t n;
    if (!f) die("%s: cannot be opened", path);
    while ((n = fread(part, 1, sizeof part, f)) > 0) put(b, part, n);
    if (ferror(f)) die("%s: cannot be read", path);
    if (f != stdin) fclose(f);
}

/* The file gets its name when it is complete. */
static void write_all(const bytes *b, const char *path, int force) {
    FILE *f = stdout;
    bytes name = {NULL, 0, 0};
    if (strcmp(path, "-")) {
        if (!force && (f = fopen(path, "rb")) != NULL) {
            fclose(f);
            die("%s: exists; -f replaces it", path);
        }
        put(&name, path, strlen(path));
        put(&name, ".tmp", 5);
        f = fopen((char *)name.p, "wb");
        if (!f) die("%s: cannot be written", (char *)name.p);
        temporary = (char *)name.p;
    }
    int bad = fwrite(b->p, 1, b->n, f) != b->n;
    bad |= f == stdout ? fflush(f) : fclose(f);
#ifdef _WIN32
    if (!bad && force && temporary) remove(path);
#endif
    if (bad || (temporary && rename(temporary, path))) die("%s: cannot be written", path);
    temporary = NULL;
    free(name.p);
}


// >>coder

/* A range coder. What it writes is one long binary fraction, which is in the interval
   [low, low + range); the bytes above the 56 bits of low are already written, and a carry
   increments them. A symbol has the part [from, from + size) of `total`, at most 2^42;
   the last symbol also gets the remainder of the division. */
enum { BITS = 56 };

static uint64_t next_byte(lane *l) {
    return l->code_at < l->r->from_size ? l->r->from[l->code_at++] : 0;
}

/* Returns a number of the next symbol's part of `total`. */
static uint64_t decode(const lane *l, uint64_t total) {
    const uint64_t v = l->low / (l->range / total);
    return STX_MIN(v, total - 1);
}

/* Reduces the interval to the symbol's part, and writes or reads the bytes that are then
   known. */
static void code_part(lane *l, int unpacking, uint64_t from, uint64_t size, uint64_t total) {
    const uint64_t unit = l->range / total, mask = ((uint64_t)1 << BITS) - 1;
    bytes *to = &l->r->to;
    l->low += unpacking ? 0 - unit * from : unit * from;
    l->range = from + size < total ? unit * size : l->range - unit * from;
    if (l->low > mask)
        for (size_t i = to->n; i-- > 0 && ++to->p[i] == 0;) {}
    for (l->low &= mask; l->range >> (BITS - 8) == 0; l->range <<= 8) {
        if (!unpacking) put_byte(to, (unsigned)(l->low >> (BITS - 8)));
        l->low = (l->low << 8 & mask) | (unpacking ? next_byte(l) : 0);
    }
}

/* Writes the shortest number in the interval. The decoder reads zeros after it. */
static void encode_end(lane *l) {
    bytes *to = &l->r->to;
    l->low += ((uint64_t)1 << (BITS - 8)) - 1;
    code_part(l, 0, 0, 1, 1);
    put_byte(to, (unsigned)(l->low >> (BITS - 8)));
    while (to->n && to->p[to->n - 1] == 0) to->n--;
}


// >>probabilities

static uint32_t power[2048];            /* 2^(32 - i / 2048), nearly */

/* Sets the leaves of a tree to about 2^24 p / max p + 1, the escape's to 1/4096 of all,
   and each node above, from 1, to the sum of its children 2 node and 2 node + 1. A
   difference of two floats and its product with a constant are the same on every machine;
   all else is integers. */
static void weights(const pack *p, const stx_real *log_p, uint64_t *tree) {
    const float per_nat = 2954.6395f;   /* 2048 / ln 2 */
    const size_t leaves = (size_t)1 << p->depth;
    uint64_t *w = tree + leaves, sum = 0;
    float max = log_p[0];
    for (size_t i = 1; i < p->V; i++) max = log_p[i] > max ? log_p[i] : max;
    for (size_t i = 0; i < p->V; i++) {
        const float d = max - log_p[i];
        const uint32_t u = d < 16.5f ? (uint32_t)(d * per_nat) : 0;
        w[i] = d < 16.5f ? (power[u & 2047] >> (8 + (u >> 11))) + 1 : 1;
        sum += w[i];
    }
    if (p->escapes) w[p->V] = (sum >> 12) + 1;
    for (size_t i = leaves - 1; i > 0; i--) tree[i] = tree[2 * i] + tree[2 * i + 1];
}

/* Returns the token at the start of s and sets *len to its bytes; -1: it has none, and
   the next byte is coded as it is. */
static int32_t next_token(const pack *p, const unsigned char *s, size_t n, size_t *len) {
    uint32_t c;
    size_t k = 1;
    *len = 1;
    if (*s >= 0x80 && stx_vocab_kind(p->vocab) == STX_TOK_CHARS) {
        int32_t id = (k = stx_utf8(s, n, &c)) ? stx_vocab_find(p->vocab, (const char *)s, k) : -1;
        if (id >= 0) *len = k;
        return id;
    }
    return p->byte[*s];
}


// >>mixing

/* A token is coded as `depth` binary decisions, the bits of its id, the highest first.
   The probability of each is mixed from several: that of the model, those that were
   counted after the same context, in the lane (own) and in the dictionary, and that of
   the token after the longest match. The inputs are stretched, ln(p / (1 - p)), their
   weighted sum is squashed, and the weights follow the gradient of the code length: the
   logistic mixing of M. Mahoney, "Data Compression Explained", section 4.3. A stretched 1
   is 256, a probability of 1 is 65536. */
enum { RANGE = 3071, ONE = 65536 };

static int32_t squashed[2 * RANGE + 1];
static int16_t stretch[ONE];

static int32_t limit(int64_t v, int32_t least, int32_t most) {
    return (int32_t)STX_MIN(STX_MAX(v, least), most);
}

static int32_t squash(int64_t v) { return squashed[limit(v, -RANGE, RANGE) + RANGE]; }

static void fill_tables(void) {
    const uint64_t one = (uint64_t)1 << 32;
    uint64_t v = 0xFFFFFFFFu;
    for (int i = 0; i < 2048; i++, v = v * 4293513907u >> 32) power[i] = (uint32_t)v;
    v = one;
    for (int i = 0; i <= RANGE; i++, v = v * 4278222789u >> 32) {   /* v = 2^32 e^(-i/256) */
        squashed[RANGE + i] = (int32_t)((one << 16) / (one + v));
        squashed[RANGE - i] = ONE - squashed[RANGE + i];
    }
    for (int i = -RANGE, p = 0; p < ONE; stretch[p++] = (int16_t)i)
        while (i < RANGE && squash(i) < p) i++;
}

/* Without a dictionary, records begin with these probabilities and weights. */
static void learned_begin(mixing *l) {
    for (int i = 0; i < 2 * CONTEXTS; i++)
        for (int n = 0; n < 16; n++)
            for (int k = 0; k < 256; k++)
                l->slot[i / CONTEXTS][i % CONTEXTS][n << 8 | k] =
                    (uint16_t)(ONE / 2 + (256 * k + 128 - ONE / 2) * (2 * n + 1) / (2 * n + 2));
    for (int i = 0; i < MATCHES; i++) l->match[i] = (uint16_t)(ONE - 1 - ONE / (4 + i / 3 * 4));
    for (int i = 0; i < 2 * SETS * INPUTS; i++)
        l->weight[i / INPUTS / SETS][i / INPUTS % SETS][i % INPUTS] = i % INPUTS ? ONE / 11 : ONE;
}

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

/* The lane's next token is part of its text. Sets the contexts of the one after it. */
static void advance(const pack *p, lane *l) {
    const int32_t token = p->text[l->end++];
    uint32_t h = 0;
    for (size_t i = 1; i <= 6; i++) {
        h = hash(h, i <= l->end - l->begin ? (uint32_t)p->text[l->end - i] : 0);
        if (i != 5) l->context[STX_MIN(i, 5) - 1] = h;
    }
    l->context[5] = p->in_word[token] ? hash(l->context[5], (uint32_t)token) : 0;
}

/* Returns the group of context i and the decisions so far (node), or NULL; make: replaces
   what another context has there. */
static group *find(const table *t, const lane *l, int i, size_t node, int make) {
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
    const int32_t now = P + (bit ? (4095 - P) * part[n] / ONE : -(P * part[n] / ONE));
    *slot = (uint16_t)((now << 4 | STX_MIN(n + 1, 15)) ^ 0x8000);
}

static void learn_p(uint16_t *P, int bit) {
    *P = (uint16_t)(*P + ((bit ? ONE - 1 : 0) - *P) / 64);
}

/* Counts text[from .. to) in a table, context i alone. */
static void count(const pack *p, const table *t, lane *l, size_t to, int i) {
    while (l->end < to) {
        const size_t id = (size_t)p->text[l->end];
        group *g = NULL;
        for (int b = 0; b < p->depth; b++) {
            const size_t node = (id | (size_t)1 << p->depth) >> (p->depth - b);
            if (b % 4 == 0) g = find(t, l, i, node, 1);
            learn_slot(&g->slot[slot_of(b, node)], id >> (p->depth - 1 - b) & 1);
        }
        advance(p, l);
    }
}

static uint32_t *after(const pack *p, const table *t, const lane *l) {
    uint32_t key = 0;
    for (size_t i = 1; i <= LEAST; i++) key = hash(key, (uint32_t)p->text[l->end - i]);
    return &t->after[key * 2654435761u >> (32 - t->after_bits)];
}

/* Takes the match that ends before text[at], if it is long enough. */
static void try_match(const pack *p, lane *l, size_t at) {
    size_t n = 0;
    const size_t most = STX_MIN(STX_MIN(at, l->end - l->begin), 32);
    while (n < most && p->text[at - 1 - n] == p->text[l->end - 1 - n]) n++;
    if (n < LEAST) return;
    l->match = at;
    l->length = n;
}

/* Continues the match with the last token, or looks for another. */
static void match_next(const pack *p, lane *l) {
    if (l->match) {
        const int hit = p->text[l->match++] == p->text[l->end - 1];
        l->length++;
        if (!hit || l->match == p->known || l->match == p->size) l->match = l->length = 0;
    }
    if (l->end - l->begin < LEAST) return;
    uint32_t *own = after(p, l->own, l);
    if (!l->length) try_match(p, l, *own);
    if (!l->length && p->phrases.groups) try_match(p, l, *after(p, &p->phrases, l));
    *own = (uint32_t)l->end;
}

/* What the decisions of one token have in common. */
typedef struct inputs {
    group *own[CONTEXTS], *known[CONTEXTS];
    size_t set[2];
    uint16_t *match;                    /* probability that the match is right */
} inputs;

/* Codes or decodes one decision and returns it. P: the model's probability of 1;
   at: the slot; expected: what the match predicts, or -1. */
static int code_bit(const pack *p, lane *l, inputs *in, int32_t P, size_t at,
                    int expected, int bit) {
    mixing *const k = l->learned;
    int32_t x[INPUTS], part[2];
    uint16_t *worth[2 * CONTEXTS];
    const int n = p->phrases.groups ? 2 * CONTEXTS : CONTEXTS;
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
    if (p->unpacking) bit = decode(l, ONE) < (uint64_t)P;
    code_part(l, p->unpacking, bit ? 0 : (uint64_t)P, (uint64_t)(bit ? P : ONE - P), ONE);

    for (int s = 0; s < 2; s++) {
        const int64_t error = (int64_t)p->speed * (bit * ONE - part[s]);
        for (int i = 0; i < n + 3; i++)
            k->weight[s][in->set[s]][i] += (int32_t)(x[i] * error / 32768);
    }
    for (int i = 0; i < n; i++)
        if (worth[i]) learn_p(worth[i], bit);
    for (int i = 0; i < CONTEXTS; i++) learn_slot(&in->own[i]->slot[at], bit);
    if (expected >= 0) learn_p(in->match, bit == expected);
    return bit;
}

/* Codes or decodes an id below 2^depth with the model's weights. */
static size_t code_id(const pack *p, lane *l, const uint64_t *tree, size_t id) {
    const size_t leaf = (size_t)1 << p->depth;
    const size_t guess = l->match ? (size_t)p->text[l->match] | leaf : 0;
    const size_t length = l->length < 8 ? l->length : STX_MIN(6 + l->length / 4, 15);
    const size_t state = (l->length > 0) + (l->length > 15) + (l->length > 31);
    size_t node = 1;
    inputs in;
    memset(&in, 0, sizeof in);
    for (int b = 0; b < p->depth; b++) {
        const int left = p->depth - b, agrees = guess >> left == node;
        if (b % 4 == 0)
            for (int i = 0; i < CONTEXTS; i++) {
                in.own[i] = find(l->own, l, i, node, 1);
                if (p->phrases.groups) in.known[i] = find(&p->phrases, l, i, node, 0);
            }
        in.set[0] = (agrees ? state : 0) * 17 + (size_t)b;
        in.set[1] = l->end > l->begin ? (size_t)p->text[l->end - 1] % SETS : 0;
        in.match = &l->learned->match[length * 3 + (b > 0) + (b > 2)];
        if (!tree[2 * node + 1]) {      /* no id begins so */
            node *= 2;
            continue;
        }
        const int32_t P = limit((int64_t)(tree[2 * node + 1] * ONE / tree[node]), 1, ONE - 1);
        const int expected = agrees ? (int)(guess >> (left - 1) & 1) : -1;
        const int bit = id >> (left - 1) & 1;
        node = 2 * node + (size_t)code_bit(p, l, &in, P, slot_of(b, node), expected, bit);
    }
    return node - leaf;
}

static void lane_begin(pack *p, lane *l, record *r) {
    l->r = r;
    l->at = l->code_at = 0;
    l->low = 0;
    l->range = (uint64_t)1 << BITS;
    for (int i = 0; p->unpacking && i < BITS / 8; i++) l->low = l->low << 8 | next_byte(l);
    if (p->shared) return;
    table_begin(l->own);
    if (l->learned != &p->learned) *l->learned = p->learned;
    l->end = l->begin;
    l->match = l->length = 0;
    memset(l->context, 0, sizeof l->context);
}

/* Codes one token of a lane. */
static void code_token(const pack *p, lane *l, const uint64_t *tree) {
    const unsigned char *s = p->unpacking ? NULL : l->r->from + l->at;
    unsigned char byte = '\n';
    const char *text = (const char *)&byte;
    size_t len = 1, id = p->V;
    if (s) {
        l->token = next_token(p, s, l->r->size - l->at, &len);
        if (l->token >= 0) id = (size_t)l->token;
    }
    id = code_id(p, l, tree, id);
    if (id == p->V) {
        byte = p->unpacking ? (unsigned char)decode(l, 256) : *s;
        code_part(l, p->unpacking, byte, 1, 256);
    } else if ((int32_t)id != stx_vocab_eos(p->vocab))
        text = stx_vocab_piece(p->vocab, (int32_t)id, &len);
    if (p->unpacking) {
        len = STX_MIN(len, l->r->size - l->at);
        put(&l->r->to, text, len);
    }
    l->at += len;
    l->token = id < p->V ? (int32_t)id : 0;     /* 0: what the model reads after an escape */
    p->text[l->end] = l->token;
    advance(p, l);
    match_next(p, l);
}

static void step_part(const stx_share *share, const void *job) {
    const pack *p = (const pack *)job;
    for (size_t i = share->begin; i < share->end; i++) {
        uint64_t *tree = p->tree + (i << (p->depth + 1));
        if (!p->team[i].r) continue;
        weights(p, p->scores + i * p->V, tree);
        code_token(p, &p->team[i], tree);
    }
}


// >>model

static void check(const pack *p) {
    if (!stx_ok(p->x)) die("%s", stx_error(p->x));
}

/* A new model, for --adapt without -m. These numbers are part of the format. */
static void new_model(pack *p) {
    stx_sru_lm_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = 256;
    d.dim = 384;
    d.sru.layers = 3;
    d.sru.transform = STX_SRU_ATTENTION;
    d.sru.no_attention = 1;
    d.sru.highway_bias = -1;
    p->lm = stx_sru_as_lm(stx_sru_lm_create(p->x, &d));
    p->vocab = stx_vocab_build(p->x, NULL, NULL, 0, 0);
}

static void open_model(pack *p, const char *path, int threads) {
    const stx_family *const families[] = {stx_span_family(), stx_sru_family(), stx_comp_family(),
                                          stx_par_family()};
    stx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.threads = threads;             /* f32 on the CPU: the same bits on every machine */
    p->x = stx_create(&desc);
    if (!p->x) die("out of memory");
    if (!strcmp(stx_backend(p->x), "cblas"))
        die("this build uses a CBLAS, whose results differ between machines: build without it");
    if (path) {
        p->lm = stx_lm_open(p->x, path, families, 4);
        p->vocab = stx_vocab_open(p->x, path);
    } else new_model(p);
    check(p);

    /* the digest of the weights and the vocabulary, not of the whole checkpoint */
    size_t n;
    stx_writer *w = stx_writer_create(p->x);
    stx_model_write(w, p->lm.family, p->lm.model);
    stx_vocab_write(w, p->vocab);
    unsigned char *file = (unsigned char *)stx_writer_bytes(w, &n);
    check(p);
    p->digest = digest(file, n);
    stx_block_free(p->x, file);

    p->V = stx_vocab_size(p->vocab);
    const int kind = stx_vocab_kind(p->vocab);
    if ((kind != STX_TOK_BYTES && kind != STX_TOK_CHARS) || p->V > 1 << 16)
        die("%s: expected a model of bytes or characters, got one of words or pieces; train it "
            "with --tokens bytes", path);
    for (int c = 0; c < 256; c++) {
        const char s = (char)c;
        p->byte[c] = c == '\n' ? stx_vocab_eos(p->vocab) : -1;
        if (p->byte[c] < 0) p->byte[c] = stx_vocab_find(p->vocab, &s, 1);
        p->escapes |= p->byte[c] < 0;
    }
    while ((size_t)1 << p->depth < p->V + (size_t)p->escapes) p->depth++;
    p->in_word = (uint8_t *)memory(NULL, p->V, 1);
    for (size_t i = 0; i < p->V; i++) {
        const unsigned c = *(const unsigned char *)stx_vocab_piece(p->vocab, (int32_t)i, &n);
        p->in_word[i] = c > 127 || c == '_' || (c | 32) - 'a' < 26 || c - '0' < 10;
    }
}

/* Makes tokens of the dictionary. It is a part of the model. */
static void open_dictionary(pack *p, const char *path) {
    bytes *const d = &p->dictionary;
    size_t len;
    read_all(d, path);
    p->digest = stx_key_add(p->digest, digest(d->p, d->n));
    p->text = (int32_t *)memory(NULL, d->n, sizeof *p->text);
    for (size_t at = 0; at < d->n; at += len) {
        if (d->n - at >= STX_MIN(d->n / 10, (size_t)TAIL)) {
            p->tail = p->known;
            p->tail_byte = at;
        }
        const int32_t id = next_token(p, d->p + at, d->n - at, &len);
        p->text[p->known++] = STX_MAX(id, 0);
    }
}

/* Returns 1 if each lane has `every` tokens that the training state has not read. */
static int all_new(const pack *p, size_t every) {
    size_t i = 0;
    while (i < p->lanes && p->team[i].r && p->team[i].end - p->team[i].begin > every) i++;
    return i == p->lanes && every <= WINDOW;
}

/* Sets in and next (T) to T tokens of the text before `end`, and those after them. */
static void window(const pack *p, size_t end, size_t T, int32_t *in, int32_t *next) {
    memcpy(in, p->text + end - T - 1, T * sizeof *in);
    memcpy(next, p->text + end - T, T * sizeof *in);
}

/* --adapt: the first training step reads the newest tokens of all lanes, with the state
   after the older ones. The others read random windows. Packing and unpacking learn the
   same. */
static void learn(pack *p, size_t every) {
    stx_ctx *x = p->x;
    for (int k = 0; k < STEPS; k++) {
        static int32_t in[MAX_LANES], next[MAX_LANES];   /* (rows,T) */
        const int newest = k == 0 && all_new(p, every);
        const size_t T = newest ? every : (size_t)WINDOW;
        const size_t rows = newest ? p->lanes : (size_t)ROWS;
        for (uint32_t i = 0; i < rows; i++) {
            uint32_t u[4];
            stx_philox(1, p->updates, i, u);
            size_t j = newest ? i : u[0] % p->lanes, tries = 0;
            while (p->team[j].end - p->team[j].begin <= T) {
                if (++tries == p->lanes) return;
                j = (j + 1) % p->lanes;
            }
            const lane *l = &p->team[j];
            const uint64_t starts = l->end - l->begin - T;
            const size_t back = newest ? 0 : (size_t)(u[1] * starts >> 32);
            window(p, l->end - back, T, in + i * T, next + i * T);
        }
        stx_begin(x, STX_TRAIN);
        stx_tensor *nll = p->lm.loss(p->lm.model, stx_tokens(x, in, rows, T),
                                     stx_tokens(x, next, rows, T), newest ? p->state : NULL,
                                     newest ? p->state : NULL);
        stx_backward(x, p->lm.total(p->lm.model, nll));
        if (stx_optim_step(p->optim, stx_schedule_lr(&p->rate, ++p->updates)))
            p->lm.updated(p->lm.model);
        check(p);
    }
}

static void progress(pack *p, size_t done) {
    const time_t now = time(NULL);
    if (!p->terminal || !p->total || (now == p->shown && done < p->total)) return;
    const double seconds = difftime(now, p->began), KB = (double)done / 1000;
    p->shown = now;
    fprintf(stderr, "\r%3.0f %%, %.1f KB/s ", 100 * (double)done / (double)p->total,
            KB / (seconds > 0 ? seconds : 1));
    if (done == p->total) fputc('\n', stderr);
}

/* The model reads p->ids, a token per lane. */
static void feed(pack *p) {
    p->scores = p->lm.gen_feed(p->gen, p->ids, 1);
    check(p);
}

/* Codes the records of all lanes, from the state after the prompt. */
static void code_group(pack *p) {
    const size_t every = STX_MAX(BLOCK / p->lanes, 1);
    size_t len = 1, active = 0, at, i;
    p->lm.gen_reset(p->gen);
    for (at = 0; at == 0 || at < p->prompt.n; at += len) {
        int32_t id = -1;
        if (p->prompt.n) id = next_token(p, p->prompt.p + at, p->prompt.n - at, &len);
        for (i = 0; i < p->lanes; i++) p->ids[i] = STX_MAX(id, 0);
        feed(p);
    }
    for (i = 0; i < p->lanes; i++) active += p->team[i].r != NULL;
    for (size_t step = 1; active; step++) {
        size_t part = 0;
        if (p->serial) {
            stx_share all;
            memset(&all, 0, sizeof all);
            all.end = p->lanes;
            step_part(&all, p);
        } else stx_parallel(p->x, p->lanes, p->lanes * p->V * 8, step_part, p);
        for (i = 0; i < p->lanes; i++) {
            lane *l = &p->team[i];
            if (!l->r) continue;
            p->ids[i] = l->token;
            part += l->at;
            if (l->at < l->r->size) continue;
            if (!p->unpacking) encode_end(l);
            p->done += l->at;
            part -= l->at;
            l->r = NULL;
            active--;
        }
        if (p->optim && step % every == 0) learn(p, every);
        if (active) feed(p);
        progress(p, p->done + part);
    }
}

static int longer_first(const void *a, const void *b) {
    const record *const *r = (const record *const *)a, *const *s = (const record *const *)b;
    if ((*r)->size != (*s)->size) return (*r)->size > (*s)->size ? -1 : 1;
    return (*r)->index < (*s)->index ? -1 : 1;
}

/* Makes lanes for texts of `longest` tokens each. */
static void lanes_create(pack *p, size_t longest) {
    if (longest > (UINT32_MAX - p->known) / p->lanes) die("too large");
    p->size = p->known + longest * p->lanes;
    p->text = (int32_t *)memory(p->text, p->size, sizeof *p->text);
    memset(p->text + p->known, 0, longest * p->lanes * sizeof *p->text);
    p->team = (lane *)memory(NULL, p->lanes, sizeof *p->team);
    memset(p->team, 0, p->lanes * sizeof *p->team);
    p->ids = (int32_t *)memory(NULL, p->lanes, sizeof *p->ids);
    p->tree = (uint64_t *)memory(NULL, p->lanes << (p->depth + 1), sizeof *p->tree);
    memset(p->tree, 0, p->lanes * sizeof *p->tree << (p->depth + 1));
    p->gen = p->lm.gen_create(p->lm.model, p->lanes, 0);
    check(p);
    for (size_t i = 0; i < p->lanes; i++) {
        lane *l = &p->team[i];
        const int first = i == 0 || !p->shared;
        l->begin = l->end = p->known + i * longest;
        l->own = first ? (table *)memory(NULL, 1, sizeof *l->own) : p->team->own;
        if (first) table_create(l->own, p->shared ? longest * p->lanes : longest);
        l->learned = p->serial ? &p->learned : (mixing *)memory(NULL, 1, sizeof *l->learned);
    }
}

static void lanes_free(pack *p) {
    for (size_t i = 0; i < p->lanes; i++) {
        lane *l = &p->team[i];
        if (!p->serial) free(l->learned);
        if (i && p->shared) continue;
        free(l->own->groups);
        free(l->own->after);
        free(l->own);
    }
    free(p->team);
    free(p->ids);
    free(p->tree);
    p->lm.gen_free(p->gen);
}

/* Codes n records in groups of similar length; only: the index of the only one to unpack,
   or SIZE_MAX. */
static void code_records(pack *p, record *r, size_t n, size_t only) {
    record **order = (record **)memory(NULL, n, sizeof *order);
    size_t longest = 0;
    for (size_t i = 0; i < n; i++) {
        order[i] = &r[i];
        if (only == SIZE_MAX || only == i) p->total += r[i].size;
    }
    qsort(order, n, sizeof *order, longer_first);
    for (size_t i = 0; i < n; i += p->lanes)
        if (i == 0 || p->shared) longest += order[i]->size;
    lanes_create(p, longest);
    if (p->optim) {
        p->state = p->lm.state_create(p->lm.model, p->lanes, 0);
        check(p);
        p->rate.total = STEPS * (p->total / BLOCK + 1);
    }
    for (size_t first = 0; first < n; first += p->lanes) {
        int any = 0;
        for (size_t i = first; i < n && i < first + p->lanes; i++) {
            if (only != SIZE_MAX && only != order[i]->index) continue;
            lane_begin(p, &p->team[i - first], order[i]);
            any = 1;
        }
        if (any) code_group(p);
    }
    lanes_free(p);
    free(order);
}

static void count_part(const stx_share *share, const void *job) {
    const pack *p = (const pack *)job;
    for (size_t i = share->begin; i < share->end; i++) {
        lane l;
        memset(&l, 0, sizeof l);
        l.begin = l.end = p->counted;
        count(p, &p->phrases, &l, p->known, (int)i);
    }
}

/* Counts the dictionary up to p->known. */
static void count_known(pack *p) {
    lane l;
    memset(&l, 0, sizeof l);
    stx_parallel(p->x, CONTEXTS, (p->known - p->counted) * 1000, count_part, p);
    for (l.end = STX_MAX(p->counted, (size_t)LEAST); l.end < p->known; l.end++)
        *after(p, &p->phrases, &l) = (uint32_t)l.end;
    p->counted = p->known;
}

/* Reads the dictionary. Its last tenth, which trainers do not train on, shows how much
   the statistics of the rest are worth: it is packed in records of the usual size. */
static void prime(pack *p, const record *r, size_t n) {
    const size_t known = p->known, lanes = p->lanes, tail = p->dictionary.n - p->tail_byte;
    const int unpacking = p->unpacking;
    size_t piece = 0, k = 0;
    for (size_t i = 0; i < n; i++) piece += STX_MIN(r[i].size, (size_t)PIECE);
    piece = n ? STX_MAX(piece / n, 64) : (size_t)PIECE;
    table_create(&p->phrases, known);
    record *part = (record *)memory(NULL, tail / piece + 1, sizeof *part);
    for (size_t at = p->tail_byte; at < p->dictionary.n; at += piece, k++) {
        memset(&part[k], 0, sizeof *part);
        part[k].index = k;
        part[k].from = p->dictionary.p + at;
        part[k].size = STX_MIN(piece, p->dictionary.n - at);
    }
    int32_t *text = (int32_t *)memory(NULL, known, sizeof *text);
    memcpy(text, p->text, known * sizeof *text);
    p->known = p->tail;
    count_known(p);
    p->lanes = STX_MAX(STX_MIN(k, 32), 1);
    p->unpacking = 0;
    p->serial = 1;
    code_records(p, part, k, SIZE_MAX);
    free(p->text);
    p->text = text;
    p->known = known;
    count_known(p);
    p->lanes = lanes;
    p->unpacking = unpacking;
    p->serial = 0;
    p->total = p->done = 0;
    while (k) free(part[--k].to.p);
    free(part);
}


// >>files

/* Returns the length of the next record of a text: KIND is file, lines, nul, or a number
   of bytes. */
static size_t record_size(const char *kind, const unsigned char *s, size_t n, size_t part) {
    const unsigned char *end = NULL;
    if (!strcmp(kind, "lines")) end = (const unsigned char *)memchr(s, '\n', n);
    else if (!strcmp(kind, "nul")) end = (const unsigned char *)memchr(s, 0, n);
    else return STX_MIN(part, n);
    return end ? (size_t)(end - s) + 1 : n;
}

static void set_up(pack *p, const options *o, unsigned flags, const record *r, size_t n) {
    open_model(p, flags & FLAG_NOTHING ? NULL : o->model, o->threads);
    if (o->dictionary) open_dictionary(p, o->dictionary);
    if (p->unpacking && p->digest != p->expected)
        die("%s: packed with another model or dictionary (or without one)", o->in);
    learned_begin(&p->learned);
    p->speed = 1;
    if (p->known) prime(p, r, n);
    p->shared = p->serial = (flags & (FLAG_ADAPT | FLAG_WHOLE)) != 0;
    if (!p->shared && !p->known) p->speed = 2;
    if (!(flags & FLAG_ADAPT)) return;
    stx_optim_desc d;
    memset(&d, 0, sizeof d);
    d.kind = STX_MUON;
    d.clip = 1;
    d.weight_decay = 0.01;
    p->optim = stx_optim_create(p->lm.params, &d);
    p->rate.kind = STX_LR_COSINE;
    p->rate.lr = flags & FLAG_NOTHING ? 0.01 : 0.003;
    p->rate.lr_min = p->rate.lr / 4;
    p->rate.warmup = 20;
    check(p);
}

static void pack_file(pack *p, const options *o, const bytes *in, bytes *out) {
    const unsigned flags = (o->adapt ? FLAG_ADAPT : 0) | (o->model ? 0 : FLAG_NOTHING)
                         | (strcmp(o->records, "file") ? 0 : FLAG_WHOLE);
    const int whole = flags & FLAG_WHOLE;
    size_t n = 0, part, most;
    record *r = NULL;
    p->lanes = o->lanes;
    most = flags & FLAG_ADAPT ? 16 : 64;
    if (!p->lanes) p->lanes = whole ? STX_MIN(in->n / 16384, most) : 128;
    p->lanes = STX_MAX(p->lanes, 1);
    part = whole ? (in->n + p->lanes - 1) / p->lanes : (size_t)strtoull(o->records, NULL, 10);
    for (size_t at = 0; at < in->n; at += r[n++].size) {
        if ((n & (n - 1)) == 0) r = (record *)memory(r, 2 * n + 1, sizeof *r);
        memset(&r[n], 0, sizeof *r);
        r[n].index = n;
        r[n].from = in->p + at;
        r[n].size = record_size(o->records, in->p + at, in->n - at, part);
    }
    if (n) {        /* no more lanes than the same number of groups needs */
        const size_t groups = (n + p->lanes - 1) / p->lanes;
        p->lanes = (n + groups - 1) / groups;
    }
    put(&p->prompt, o->prompt, strlen(o->prompt));
    set_up(p, o, flags, r, n);
    code_records(p, r, n, SIZE_MAX);

    put(out, magic, sizeof magic);
    put_byte(out, flags);
    put_64(out, p->digest);
    put_64(out, digest(in->p, in->n));
    put_number(out, p->lanes);
    put_number(out, p->prompt.n);
    put(out, p->prompt.p, p->prompt.n);
    put_number(out, n);
    for (size_t i = 0; i < n; i++) {
        const size_t size = r[i].size, before = i ? r[i - 1].size : 0;
        put_number(out, size >= before ? 2 * (size - before) : 2 * (before - size) - 1);
        put_number(out, r[i].to.n);
    }
    for (size_t i = 0; i < n; i++) put(out, r[i].to.p, r[i].to.n);
    put_64(out, digest(out->p, out->n));
}

/* The position in a packed file. */
typedef struct reader {
    const char *path;
    const unsigned char *p, *end;
} reader;

static const unsigned char *get(reader *r, size_t n) {
    if ((size_t)(r->end - r->p) < n) die("%s: damaged: it ends too early", r->path);
    return (r->p += n) - n;
}

static size_t get_number(reader *r) {
    uint64_t v = 0;
    unsigned c = 128;
    for (int shift = 0; c & 128; shift += 7) {
        c = *get(r, 1);
        if (shift > 56 || (v |= (uint64_t)(c & 127) << shift) > SIZE_MAX / 4)
            die("%s: damaged: a number is too large", r->path);
    }
    return (size_t)v;
}

static void unpack_file(pack *p, const options *o, const bytes *in, bytes *out) {
    reader f;
    f.path = o->in;
    f.p = in->p;
    f.end = in->p + in->n;
    if (in->n < sizeof magic || memcmp(in->p, magic, sizeof magic - 1))
        die("%s: not a packed file", f.path);
    if (in->p[7] != magic[7])
        die("%s: has version %d of the format, this program reads version %d", f.path, in->p[7],
            magic[7]);
    if (in->n < 36 || digest(in->p, in->n - 8) != get_64(f.end - 8))
        die("%s: damaged or cut off: its digest does not match", f.path);
    f.end -= 8;
    get(&f, sizeof magic);
    const unsigned flags = *get(&f, 1);
    p->expected = get_64(get(&f, 8));
    const uint64_t content = get_64(get(&f, 8));
    p->unpacking = 1;
    p->lanes = get_number(&f);
    const size_t prompt = get_number(&f);
    put(&p->prompt, get(&f, prompt), prompt);
    const size_t n = get_number(&f);
    if (!p->lanes || p->lanes > MAX_LANES || n > in->n || flags > 7)
        die("%s: damaged: impossible sizes", f.path);

    record *r = (record *)memory(NULL, n, sizeof *r);
    for (size_t i = 0; i < n; i++) {
        const size_t change = get_number(&f), before = i ? r[i - 1].size : 0;
        memset(&r[i], 0, sizeof *r);
        r[i].index = i;
        r[i].size = change & 1 ? before - (change + 1) / 2 : before + change / 2;
        r[i].from_size = get_number(&f);
        if (!r[i].size || r[i].size > SIZE_MAX / 4) die("%s: damaged: impossible sizes", f.path);
    }
    for (size_t i = 0; i < n; i++) r[i].from = get(&f, r[i].from_size);
    if (f.p != f.end) die("%s: damaged: it is too long", f.path);
    if (o->record && o->record > n) die("--record %zu: the file has %zu records", o->record, n);
    if (o->record && flags & (FLAG_ADAPT | FLAG_WHOLE))
        die("--record: records that were packed with --adapt, and parts of a file, depend on each "
            "other");
    if (!o->model && !(flags & FLAG_NOTHING))
        die("%s: needs -m with the model that packed it", f.path);
    set_up(p, o, flags, r, n);
    code_records(p, r, n, o->record ? o->record - 1 : SIZE_MAX);
    for (size_t i = 0; i < n; i++) put(out, r[i].to.p, r[i].to.n);
    if (!o->record && digest(out->p, out->n) != content)
        die("%s: cannot be unpacked: the results of this build or processor differ; see "
            "docs/bits.md", f.path);
}

static const char help[] =
    "Packs a file with a model that a trainer saved as the statistics of an\n"
    "arithmetic coder. The same model unpacks it, on any processor.\n\n"
    "  pack -m MODEL FILE               writes FILE.pack\n"
    "  pack -d -m MODEL FILE.pack       unpacks it\n"
    "  pack --adapt FILE                without a model: learns as it packs\n\n"
    "  -m, --model FILE    checkpoint of a trainer, of any family, for bytes or\n"
    "                      characters\n"
    "  -d, --unpack        unpack\n"
    "  -o, --output FILE   instead of FILE.pack, or FILE without .pack; -: standard\n"
    "                      output\n"
    "  -f, --force         replace an existing file\n"
    "  --records KIND      each record by itself: lines, nul (records that end with\n"
    "                      a zero byte), or a number of bytes\n"
    "  --record N          with -d: only record N, counted from 1\n"
    "  --prompt TEXT       what the model reads before each record (a line end)\n"
    "  --dictionary FILE   text of the kind, such as the training text, whose\n"
    "                      statistics are mixed with the model's; a part of the\n"
    "                      model: unpacking needs it, too\n"
    "  --adapt             learn from what is packed; slow\n"
    "  --lanes N           parts of a file, or records, that are coded in lockstep\n"
    "  -t, --threads N     number of threads; 0: all\n\n"
    "FILE - is standard input. A packed file can only be unpacked with the model\n"
    "that packed it: keep it.\n";

static void parse(options *o, int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
        const int is_short = a[0] == '-' && a[1] && a[1] != '-';
        if (!strcmp(a, "-h") || !strcmp(a, "--help")) {
            fputs(help, stdout);
            exit(0);
        } else if (!strcmp(a, "-d") || !strcmp(a, "--unpack")) o->unpack = 1;
        else if (!strcmp(a, "-f") || !strcmp(a, "--force")) o->force = 1;
        else if (!strcmp(a, "--adapt")) o->adapt = 1;
        else if (!is_short && strncmp(a, "--", 2)) {
            if (o->in) die("one file at a time: %s or %s? (--help)", o->in, a);
            o->in = a;
        } else {
            static const char *const with_number[] = {"--record", "--lanes", "--threads"};
            size_t number = 0;
            char *end = NULL;
            if (!strcmp(a, "-t")) a = with_number[2];
            if (!value) die("%s: needs a value, or is unknown (--help)", a);
            for (int k = 0; k < 3; k++) {
                if (strcmp(a, with_number[k])) continue;
                number = (size_t)strtoull(value, &end, 10);
                const size_t most = k ? (size_t)MAX_LANES : SIZE_MAX / 2;
                if (*value < '0' || *value > '9' || *end || number > most)
                    die("%s: expected a number, got %s", a, value);
            }
            if (!strcmp(a, "-m") || !strcmp(a, "--model")) o->model = value;
            else if (!strcmp(a, "-o") || !strcmp(a, "--output")) o->out = value;
            else if (!strcmp(a, "--records")) o->records = value;
            else if (!strcmp(a, "--prompt")) o->prompt = value;
            else if (!strcmp(a, "--dictionary")) o->dictionary = value;
            else if (!strcmp(a, "--record")) o->record = number;
            else if (!strcmp(a, "--lanes")) o->lanes = number;
            else if (!strcmp(a, "--threads")) o->threads = (int)number;
            else die("%s: unknown option (--help)", a);
            i++;
        }
    }
    if (!o->in) die("expected a file (--help)");
    if (strcmp(o->records, "file") && strcmp(o->records, "lines") && strcmp(o->records, "nul")
        && (*o->records < '1' || *o->records > '9'))
        die("--records: expected lines, nul or a number of bytes, got %s", o->records);
    if (!o->unpack && !o->model && !o->adapt) die("needs -m MODEL, or --adapt (--help)");
    if (o->out) return;

    /* FILE.pack, or FILE without .pack */
    const size_t n = strlen(o->in);
    char *name = (char *)memory(NULL, n + 6, 1);
    strcpy(name, o->in);
    o->out = name;
    if (!strcmp(name, "-")) return;
    if (!o->unpack) strcat(name, ".pack");
    else if (n > 5 && !strcmp(name + n - 5, ".pack")) name[n - 5] = 0;
    else die("%s: does not end in .pack: name the output with -o", o->in);
}

int main(int argc, char **argv) {
    options o;
    pack p;
    bytes in = {NULL, 0, 0}, out = {NULL, 0, 0};
    memset(&o, 0, sizeof o);
    memset(&p, 0, sizeof p);
    o.records = "file";
    o.prompt = "\n";
    parse(&o, argc, argv);
    read_all(&in, o.in);
    fill_tables();
    p.terminal = isatty(2);
    p.began = time(NULL);
    if (o.unpack) unpack_file(&p, &o, &in, &out);
    else pack_file(&p, &o, &in, &out);
    write_all(&out, o.out, o.force);
    stx_vocab_free(p.vocab);
    stx_destroy(p.x);
    return 0;
}
