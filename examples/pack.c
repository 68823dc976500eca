/* pack.c - packs a file, or many small records, with a model of any family as the
   statistics of an arithmetic coder. docs/pack.md explains how, and compares.

   Copy it next to seqtx.h, the headers of the families and seqtx_text.h (in the source
   tree, add -I.):
       cc -O3 pack.c -lm -pthread -o pack
       ./pack -m run.safetensors my.txt                   my.txt.pack
       ./pack -d -m run.safetensors my.txt.pack           my.txt again
       ./pack --help

   Reading order: code_part (the coder), weights (from log-probabilities to integers),
   code_token (one token), predicted (repeated text), code_group (many records in
   lockstep), learn (--adapt), pack_file and unpack_file (the format).

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

static const char magic[8] = {'s', 't', 'x', 'p', 'a', 'c', 'k', 1 /* version */};

enum { FLAG_ADAPT = 1, FLAG_NOTHING = 2 /* the model learns from nothing */ };

/* --adapt: after every BLOCK tokens of all lanes together, STEPS training steps, each
   with ROWS windows of WINDOW tokens. These numbers are part of the format. */
enum { BLOCK = 512, STEPS = 5, ROWS = 16, WINDOW = 64, MAX_LANES = 4096 };

/* Matches, see predicted: of at least OWN tokens of a lane's past, or KNOWN tokens of the
   dictionary. */
enum { OWN = 3, KNOWN = 12, TABLE = 14, LARGE_TABLE = 20, LENGTHS = 8, LEVELS = 4 };

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

/* A lane codes one record after the other. The lanes are coded in lockstep: one token of
   each record, then one step of the model for all of them. */
typedef struct lane {
    record *r;                          /* NULL: idle */
    size_t at;                          /* bytes of the record that are coded */
    uint64_t low, range;                /* the coder; unpacking: low is the packed number
                                           less the lower end of the interval */
    size_t code_at;                     /* unpacking: packed bytes that are read */
    int32_t token;                      /* the last token, which the model reads next */
    int32_t *past;                      /* (count): the tokens of the record so far;
                                           --adapt: of all records of this lane */
    size_t count;
    size_t match, length;               /* the last `length` tokens are also those before
                                           token `match` of the dictionary and, after it,
                                           the past; length 0: no match */
    uint32_t *table;                    /* the position after each hash of OWN tokens */
    int32_t bonus[2][LENGTHS][LEVELS];  /* see predicted; 1: dictionary */
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
    uint64_t digest, updates;           /* digest: of the model */
    void *gen;
    int32_t byte[256];                  /* the token of each byte, or -1 */
    size_t V, lanes, total, done;       /* total, done: bytes, for the progress */
    int unpacking, escapes, terminal;   /* escapes: 1: some bytes have no token */
    bytes prompt;
    int32_t *words;                     /* (known): the tokens of the dictionary */
    size_t known;
    uint32_t *table;                    /* as lane.table, of the dictionary */
    lane *lane;                         /* (lanes) */
    int32_t *ids;                       /* (lanes): what the model reads next */
    const stx_real *scores;             /* (lanes,V): log p of the tokens after them */
    uint32_t *weight;                   /* (lanes,V): the same as integers */
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

static void fill_power(void) {
    uint64_t v = 0xFFFFFFFFu;
    for (int i = 0; i < 2048; i++, v = v * 4293513907u >> 32) power[i] = (uint32_t)v;
}

/* Sets w (V) to about 2^24 p / max p + 1 and returns the sum. A difference of two floats
   and its product with a constant are the same on every machine; all else is integers. */
static uint64_t weights(const stx_real *log_p, size_t V, uint32_t *w) {
    const float per_nat = 2954.6395f;   /* 2048 / ln 2 */
    float max = log_p[0];
    uint64_t sum = 0;
    for (size_t i = 1; i < V; i++) max = log_p[i] > max ? log_p[i] : max;
    for (size_t i = 0; i < V; i++) {
        const float d = max - log_p[i];
        const uint32_t u = d < 16.5f ? (uint32_t)(d * per_nat) : 0;
        w[i] = d < 16.5f ? (power[u & 2047] >> (8 + (u >> 11))) + 1 : 1;
        sum += w[i];
    }
    return sum;
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

/* A model knows the language, but few names exactly. If the last tokens are also
   elsewhere in the record or in the dictionary, the token after them is likely here, too.
   Whether it does is coded first: the odds of the model, w to `others`, times a factor
   that is learned for each length of the match and each level of w. Sets *bonus to its
   base-2 logarithm times 2048, and returns the probability times 2^20. */
static uint64_t predicted(lane *l, size_t known, uint64_t w, uint64_t others, int32_t **bonus) {
    size_t level = 0;
    while (level < LEVELS - 1 && w >> (6 * level + 6)) level++;
    *bonus = &l->bonus[l->match < known][STX_MIN(l->length / 4, LENGTHS - 1)][level];
    const uint32_t up = (uint32_t)(**bonus + 2047) / 2048;
    const uint64_t factor = power[2048 * up - (uint32_t)**bonus] >> 8;     /* times 2^24 / 2^up */
    const uint64_t odds = factor * (w >> 4 | 1) << up >> 24;
    const uint64_t P = (odds << 20) / (odds + (others >> 4 | 1));
    return STX_MIN(STX_MAX(P, 16), (1 << 20) - 16);
}

static void learn_bonus(int32_t *bonus, uint64_t P, int hit) {
    *bonus += ((hit << 20) - (int32_t)P) / 256;
    *bonus = STX_MIN(STX_MAX(*bonus, 0), 12 * 2048);
}

/* Returns the entry of the n tokens before `end`. */
static uint32_t *entry(uint32_t *table, int bits, const int32_t *end, int n) {
    uint32_t key = 0;
    for (int i = 1; i <= n; i++) key = (key + (uint32_t)end[-i] + 1) * 2654435761u;
    return &table[key >> (32 - bits)];
}

/* Sets a match with the tokens before text[at], if at least `least` of them are equal. */
static void try_match(const pack *p, lane *l, const int32_t *text, size_t at, size_t least) {
    const int32_t *here = l->past + l->count;
    size_t n = 0;
    while (n < at && n < l->count && n < 32 && text[at - 1 - n] == *(here - 1 - n)) n++;
    if (n < least) return;
    l->length = n;
    l->match = text == l->past ? p->known + at : at;
}

/* The token that the match predicts. */
static int32_t match_token(const pack *p, const lane *l) {
    return l->match < p->known ? p->words[l->match] : l->past[l->match - p->known];
}

/* Appends l->token to the past and looks for a match. */
static void remember(const pack *p, lane *l) {
    if (l->count % 1024 == 0)
        l->past = (int32_t *)memory(l->past, l->count + 1024, sizeof *l->past);
    l->past[l->count++] = l->token;
    if (l->length && match_token(p, l) == l->token && l->match + 1 != p->known) {
        l->match++;
        l->length++;
    } else {
        l->length = 0;
    }
    if (l->count < OWN) return;
    uint32_t *own = entry(l->table, TABLE, l->past + l->count, OWN);
    if (!l->length) try_match(p, l, l->past, *own, OWN);
    if (!l->length && p->known && l->count >= KNOWN)
        try_match(p, l, p->words, *entry(p->table, LARGE_TABLE, l->past + l->count, KNOWN), KNOWN);
    *own = (uint32_t)l->count;
}

static void lane_begin(pack *p, lane *l, record *r) {
    l->r = r;
    l->at = l->code_at = 0;
    l->low = 0;
    l->range = (uint64_t)1 << BITS;
    for (int i = 0; p->unpacking && i < BITS / 8; i++) l->low = l->low << 8 | next_byte(l);
    if (l->table && p->optim) return;
    if (!l->table) l->table = (uint32_t *)memory(NULL, 1 << TABLE, sizeof *l->table);
    memset(l->table, 0, sizeof *l->table << TABLE);
    l->count = l->length = 0;
    for (int i = 0; i < LENGTHS * LEVELS; i++) {
        const int32_t longer = i < 2 * LEVELS ? 4096 : 8192;
        l->bonus[0][i / LEVELS][i % LEVELS] = longer;
        l->bonus[1][i / LEVELS][i % LEVELS] = 4096;
    }
}

/* Codes one token of a lane. An escape has a probability of 1/4096. */
static void code_token(const pack *p, lane *l, uint32_t *w, uint64_t sum) {
    const uint64_t escape = p->escapes ? (sum >> 12) + 1 : 0;
    const unsigned char *s = p->unpacking ? NULL : l->r->from + l->at;
    unsigned char byte = '\n';
    const char *text = (const char *)&byte;
    size_t len = 1, id = p->V;
    int hit = 0;
    if (s) {
        l->token = next_token(p, s, l->r->size - l->at, &len);
        if (l->token >= 0) id = (size_t)l->token;
    }
    if (l->length) {
        const size_t guess = (size_t)match_token(p, l);
        int32_t *bonus;
        const uint64_t P = predicted(l, p->known, w[guess], sum + escape - w[guess], &bonus);
        hit = p->unpacking ? decode(l, 1 << 20) < P : id == guess;
        code_part(l, p->unpacking, hit ? 0 : P, hit ? P : (1 << 20) - P, 1 << 20);
        learn_bonus(bonus, P, hit);
        sum -= w[guess];
        w[guess] = 0;
        if (hit) id = guess;
    }
    if (!hit) {
        uint64_t from = 0, v = p->unpacking ? decode(l, sum + escape) : 0;
        size_t i = 0;
        while (i < p->V && (p->unpacking ? from + w[i] <= v : i < id)) from += w[i++];
        id = i;
        code_part(l, p->unpacking, from, id < p->V ? w[id] : escape, sum + escape);
    }
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
    remember(p, l);
}

static void step_part(const stx_share *share, const void *job) {
    const pack *p = (const pack *)job;
    for (size_t i = share->begin; i < share->end; i++) {
        uint32_t *w = p->weight + i * p->V;
        if (p->lane[i].r)
            code_token(p, &p->lane[i], w, weights(p->scores + i * p->V, p->V, w));
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
}

/* Makes tokens of a text in which matches are looked up. It is a part of the model. */
static void open_dictionary(pack *p, const char *path) {
    bytes text = {NULL, 0, 0};
    size_t len;
    read_all(&text, path);
    p->digest = stx_key_add(p->digest, digest(text.p, text.n));
    p->words = (int32_t *)memory(NULL, text.n, sizeof *p->words);
    p->table = (uint32_t *)memory(NULL, 1 << LARGE_TABLE, sizeof *p->table);
    memset(p->table, 0, sizeof *p->table << LARGE_TABLE);
    for (size_t at = 0; at < text.n; at += len) {
        if (p->known >= KNOWN)
            *entry(p->table, LARGE_TABLE, p->words + p->known, KNOWN) = (uint32_t)p->known;
        const int32_t id = next_token(p, text.p + at, text.n - at, &len);
        p->words[p->known++] = STX_MAX(id, 0);
    }
    free(text.p);
}

/* Returns 1 if each lane has `every` tokens that the training state has not read. */
static int all_new(const pack *p, size_t every) {
    size_t i = 0;
    while (i < p->lanes && p->lane[i].r && p->lane[i].count > every) i++;
    return i == p->lanes && every <= WINDOW;
}

/* Sets in and next (T) to T tokens before token `end` of a lane, and those after them. */
static void window(const lane *l, size_t end, size_t T, int32_t *in, int32_t *next) {
    memcpy(in, l->past + end - T - 1, T * sizeof *in);
    memcpy(next, l->past + end - T, T * sizeof *in);
}

/* --adapt: the first training step reads the newest tokens of all lanes, with the state
   after the older ones. The others read random windows. Packing and unpacking learn the
   same. */
static void learn(pack *p, size_t every) {
    stx_ctx *x = p->x;
    for (int k = 0; k < STEPS; k++) {
        static int32_t in[MAX_LANES], next[MAX_LANES];   /* (rows,T) */
        const int newest = k == 0 && all_new(p, every);
        const size_t T = newest ? every : WINDOW, rows = newest ? p->lanes : ROWS;
        for (uint32_t i = 0; i < rows; i++) {
            uint32_t u[4];
            stx_philox(1, p->updates, i, u);
            size_t j = newest ? i : u[0] % p->lanes, tries = 0;
            while (p->lane[j].count <= T) {
                if (++tries == p->lanes) return;
                j = (j + 1) % p->lanes;
            }
            const lane *l = &p->lane[j];
            const size_t back = newest ? 0 : (size_t)(u[1] * (uint64_t)(l->count - T) >> 32);
            window(l, l->count - back, T, in + i * T, next + i * T);
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
    if (!p->terminal || (now == p->shown && done < p->total)) return;
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
    for (i = 0; i < p->lanes; i++) active += p->lane[i].r != NULL;
    for (size_t step = 1; active; step++) {
        size_t part = 0;
        stx_parallel(p->x, p->lanes, p->lanes * p->V * 8, step_part, p);
        for (i = 0; i < p->lanes; i++) {
            lane *l = &p->lane[i];
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

/* Codes n records in groups of similar length; only: the index of the only one to unpack,
   or SIZE_MAX. */
static void code_records(pack *p, record *r, size_t n, size_t only) {
    record **order = (record **)memory(NULL, n, sizeof *order);
    p->lane = (lane *)stx_persist(p->x, p->lanes * sizeof *p->lane);
    p->ids = (int32_t *)stx_persist(p->x, p->lanes * sizeof *p->ids);
    p->weight = (uint32_t *)stx_persist(p->x, stx_bytes_of(p->lanes, p->V, sizeof *p->weight));
    p->gen = p->lm.gen_create(p->lm.model, p->lanes, 0);
    if (p->optim) p->state = p->lm.state_create(p->lm.model, p->lanes, 0);
    check(p);
    for (size_t i = 0; i < n; i++) {
        order[i] = &r[i];
        if (only == SIZE_MAX || only == i) p->total += r[i].size;
    }
    qsort(order, n, sizeof *order, longer_first);
    if (p->optim) p->rate.total = STEPS * (p->total / BLOCK + 1);

    for (size_t first = 0; first < n; first += p->lanes) {
        int any = 0;
        for (size_t i = first; i < n && i < first + p->lanes; i++) {
            if (only != SIZE_MAX && only != order[i]->index) continue;
            lane_begin(p, &p->lane[i - first], order[i]);
            any = 1;
        }
        if (any) code_group(p);
    }
    free(order);
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

static void set_up(pack *p, const options *o, unsigned flags) {
    open_model(p, flags & FLAG_NOTHING ? NULL : o->model, o->threads);
    if (o->dictionary) open_dictionary(p, o->dictionary);
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
    const unsigned flags = (o->adapt ? FLAG_ADAPT : 0) | (o->model ? 0 : FLAG_NOTHING);
    const int whole = !strcmp(o->records, "file");
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
    set_up(p, o, flags);
    put(&p->prompt, o->prompt, strlen(o->prompt));
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
    const uint64_t model = get_64(get(&f, 8)), content = get_64(get(&f, 8));
    p->unpacking = 1;
    p->lanes = get_number(&f);
    const size_t prompt = get_number(&f);
    put(&p->prompt, get(&f, prompt), prompt);
    const size_t n = get_number(&f);
    if (!p->lanes || p->lanes > MAX_LANES || n > in->n || flags > 3)
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
    if (o->record && flags & FLAG_ADAPT)
        die("--record: records that were packed with --adapt depend on each other");
    if (!o->model && !(flags & FLAG_NOTHING))
        die("%s: needs -m with the model that packed it", f.path);
    set_up(p, o, flags);
    if (p->digest != model)
        die("%s: packed with another model or dictionary (or without one)", f.path);
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
    "  --dictionary FILE   text of the kind, whose phrases are looked up; a part of\n"
    "                      the model: unpacking needs it, too\n"
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
                if (*value < '0' || *value > '9' || *end || number > (k ? MAX_LANES : SIZE_MAX / 2))
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
    fill_power();
    p.terminal = isatty(2);
    p.began = time(NULL);
    if (o.unpack) unpack_file(&p, &o, &in, &out);
    else pack_file(&p, &o, &in, &out);
    write_all(&out, o.out, o.force);
    stx_vocab_free(p.vocab);
    stx_destroy(p.x);
    return 0;
}
