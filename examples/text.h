/* text.h - v0.1 - text as tokens for seqtx: vocabularies, tokenised files, batches of parallel streams
   no warranty implied; MIT or public domain, your choice (end of seqtx.h)

   In ONE .c (or .cpp) file:                everywhere else:
       #define SEQTX_IMPLEMENTATION             #include "seqtx_attn_span.h"
       #include "seqtx_attn_span.h"             #include "text.h"
       #include "text.h"
   It needs seqtx.h only: any family header may come before it, or seqtx.h itself; with none of them it includes
   seqtx.h, which must then stand beside it or on the compiler's path. Link -lm (and -pthread on older systems).
   (SEQTX_TEXT_IMPLEMENTATION compiles this header's part alone, when seqtx.h's is compiled elsewhere.)

   The models know token ids only and need none of this. It is what the trainers read text with, and free to copy.

   MANUAL

       text file --stx_vocab_build--> vocabulary
       text file + vocabulary --stx_corpus_open--> tokens --stx_batches_create--> batches --stx_batches_next--> x, y (R,T)

     STX_TOK_BYTES            V = 256, token = byte, nothing to build
     STX_TOK_BYTES, compact   the distinct bytes of the training text; byte 10 is <eos>. The references' enwik8: V = 205
     STX_TOK_CHARS            the distinct Unicode code points of the training text (strict UTF-8)
     STX_TOK_CHARS, eos       the same; a line end is <eos>. The references' text8: V = 28
     STX_TOK_WORDS            each line split on Unicode white space, then <eos>. The references' WikiText-103: V = 267735

   A line ends with \n, \r or \r\n (compact: only \n). Where there is an <eos>, a text that does not end in a line end gets
   one more <eos>, as in the references.
   Byte ranges [begin, end) cut one file into training, validation and test part; end = 0 is the end of the file. A limit
   inside a character or a \r\n (CHARS, WORDS) moves forward to its end; WORDS: to the next word or line. The part that ends
   and the part that begins there move alike: adjoining ranges lose nothing and share nothing.

   Everything made here belongs to the caller and must be freed before its context is destroyed. All functions accept NULL for
   their object, and do nothing once the context is in error; errors are the context's, as everywhere (STX_ERR_IO cannot read,
   STX_ERR_FORMAT is not what it should be, STX_ERR_ARG).

   Quick start (compiles as it stands): the words of its own source, in blocks of two streams.

   //>quickstart
       #define SEQTX_IMPLEMENTATION
       #include "text.h"
       #include <stdio.h>
       int main(void) {
           stx_ctx *x = stx_create(NULL);
           stx_vocab_desc vd = {0};
           stx_batches_desc bd = {0};
           int32_t in[2 * 8], next[2 * 8];
           char text[500];
           vd.kind = STX_TOK_WORDS; vd.min_count = 2;
           bd.B = 2; bd.T = 8;
           stx_vocab *v = stx_vocab_build(x, &vd, __FILE__, 0, 0);
           stx_corpus *c = stx_corpus_open(x, v, __FILE__, 0, 0);
           stx_batches *b = stx_batches_create(x, c, &bd);
           for (int step = 0; step < 3 && stx_batches_next(b, in, next) != STX_BATCH_END; step++) {
               size_t n = stx_vocab_decode(v, in, 8, text, sizeof text);         // row 0 of the block
               if (n <= sizeof text) printf("block %d: %.*s\n", step, (int)n, text);
           }
           printf("%zu tokens, %zu words %s\n", stx_corpus_size(c), stx_vocab_size(v), stx_error(x));
           int ok = stx_ok(x);
           stx_batches_free(b);
           stx_corpus_close(c);
           stx_vocab_free(v);
           stx_destroy(x);
           return !ok;
       }
   //<quickstart

   Another kind of token. What knows the kinds: stx__scan_next cuts a text into pieces, stx__range_limit says where a part of a
   file may begin, stx_vocab_decode what stands between pieces, stx__piece_valid which pieces a stored vocabulary of the kind
   may have; the number of a kind is in stored vocabularies, so new ones go to the end. What cuts text elsewhere needs none of
   that: stx_corpus_wrap takes token ids.

   Reading order: stx__scan_next (text to pieces), stx__vocab_count, stx__corpus_fill, stx_batches_next.
*/
#if !defined(SEQTX_H) || (defined(SEQTX_IMPLEMENTATION) && !defined(SEQTX_IMPLEMENTATION_DONE))
#include "seqtx.h"
#endif

#ifndef SEQTX_TEXT_H
#define SEQTX_TEXT_H

#ifdef __cplusplus
extern "C" {
#endif

// >>vocabulary ---------------------------------------------------------------------------------------------

enum { STX_TOK_BYTES, STX_TOK_CHARS, STX_TOK_WORDS };               /* stx_vocab_desc.kind */
enum {                                                              /* stx_vocab_desc.order */
    STX_ORDER_FIRST,            /* first occurrence (Adaptive Span, plain input) */
    STX_ORDER_COUNT_LATER,      /* count, descending; equal counts: LATER first occurrence first (Adaptive Span, adapt_io) */
    STX_ORDER_COUNT_EARLIER     /* count, descending; equal counts: earlier first occurrence first (Transformer-XL) */
};

#define STX_NPOS SIZE_MAX       /* what encode and decode return in error */

typedef struct stx_vocab_desc {     /* zero means default */
    int      kind;              /* STX_TOK_BYTES */
    int      order;             /* STX_ORDER_FIRST. Adaptive input and softmax want a COUNT order */
    int      compact;           /* BYTES: see above */
    int      eos;               /* CHARS: a line end is <eos> */
    int      eos_first;         /* <eos> is index 0 whatever the order (Transformer-XL on WikiText-103) */
    /* Pieces seen fewer times become <unk>; 2 or more always makes an <unk>. 0: keep all; then a piece that is not in the
       vocabulary is an error later, unless the text itself has the word <unk>. */
    uint64_t min_count;
} stx_vocab_desc;

typedef struct stx_vocab stx_vocab;

/* Builds a vocabulary from the bytes [begin, end) of a file. d = NULL: bytes. Plain bytes read no file: path may be NULL.
   NULL and an error when the file cannot be read, the range is empty or outside, or the text is not UTF-8 (CHARS, WORDS). */
STX_DEF stx_vocab *stx_vocab_build(stx_ctx *x, const stx_vocab_desc *d, const char *path, uint64_t begin, uint64_t end);
STX_DEF void stx_vocab_free(stx_vocab *v);

STX_DEF int     stx_vocab_kind(const stx_vocab *v);                 /* STX_TOK_BYTES .. */
STX_DEF size_t  stx_vocab_size(const stx_vocab *v);                 /* V */
STX_DEF int32_t stx_vocab_eos(const stx_vocab *v);                  /* id of <eos>, -1 without */
STX_DEF int32_t stx_vocab_unk(const stx_vocab *v);                  /* id of <unk>, -1 without */
STX_DEF int32_t stx_vocab_find(const stx_vocab *v, const char *piece, size_t len);      /* id, or -1 */
/* The bytes of a piece and their number, without a terminating zero ("<eos>" for the line end); NULL for an id out of range. */
STX_DEF const char *stx_vocab_piece(const stx_vocab *v, int32_t id, size_t *len);

/* Text to ids, as a corpus is read, but without the additional <eos> at the end (a prompt goes on). Writes at most cap ids
   and returns how many there are (call with out = NULL, cap = 0 to count). STX_NPOS and an error that names the piece and
   its position when something is not in the vocabulary and there is no <unk>, or the text is not UTF-8. */
STX_DEF size_t stx_vocab_encode(const stx_vocab *v, const char *text, size_t len, int32_t *out, size_t cap);
/* Ids to text: <eos> is a line feed, a word is followed by one blank, so that decoding token by token gives the same as
   decoding at once. Writes at most cap bytes (no terminator) and returns how many there are. STX_NPOS and an error for an id
   out of range. */
STX_DEF size_t stx_vocab_decode(const stx_vocab *v, const int32_t *ids, size_t n, char *out, size_t cap);

/* A vocabulary as bytes (for a checkpoint: a U8 entry) and back. save writes the blob when cap suffices, and returns its
   length. load trusts nothing: NULL and STX_ERR_FORMAT for anything that save cannot have written. */
STX_DEF size_t stx_vocab_save(const stx_vocab *v, void *out, size_t cap);
STX_DEF stx_vocab *stx_vocab_load(stx_ctx *x, const void *blob, size_t len);

// >>corpus -------------------------------------------------------------------------------------------------

typedef struct stx_corpus stx_corpus;

/* Opens the bytes [begin, end) of a file as tokens. Bytes are memory mapped and never copied (files beyond 4 GiB are fine);
   characters and words become an array of 2 bytes a token (V <= 65536) or 4. Errors as stx_vocab_build and
   stx_vocab_encode, with the position in the file. v is not needed afterwards; the file must not be cut shorter meanwhile. */
STX_DEF stx_corpus *stx_corpus_open(stx_ctx *x, const stx_vocab *v, const char *path, uint64_t begin, uint64_t end);
/* Tokens that the caller has in memory (synthetic tasks); not copied, must outlive the corpus. */
STX_DEF stx_corpus *stx_corpus_wrap(stx_ctx *x, const int32_t *tokens, size_t n, uint64_t raw_bytes);
STX_DEF void stx_corpus_close(stx_corpus *c);
STX_DEF size_t   stx_corpus_size(const stx_corpus *c);              /* tokens */
/* Bytes of the text behind the tokens. True bits per byte of the raw text, whatever the kind:
   (nats per token) / ln 2 * stx_corpus_size / stx_corpus_bytes. */
STX_DEF uint64_t stx_corpus_bytes(const stx_corpus *c);
/* out[i] = token pos + i, i < n. 1; or 0 and an error when that is not inside the corpus. */
STX_DEF int stx_corpus_read(const stx_corpus *c, size_t pos, size_t n, int32_t *out);

// >>batches ------------------------------------------------------------------------------------------------

enum { STX_BATCH_END, STX_BATCH_OK, STX_BATCH_FRESH };
enum { STX_EVAL_ALL, STX_EVAL_LITERAL };

typedef struct stx_batches_desc {
    size_t   B;                 /* streams, over all ranks; required */
    size_t   T;                 /* block length; required */
    uint64_t seed;              /* of the positions after a wrap */
    size_t   rank, world;       /* this process of how many (0 of 1). Rank r has rows [r B/W, (r+1) B/W) */
} stx_batches_desc;

typedef struct stx_batches_state {      /* what a resumed run needs */
    uint64_t p, wraps;          /* position in the streams, wraps so far */
    int      fresh;             /* the next block does not continue the last one */
} stx_batches_state;

typedef struct stx_batches stx_batches;

/* B parallel streams for truncated back-propagation: n = tokens / B, row b = tokens [b n, (b+1) n), the rest is dropped.
   The corpus must outlive it. Errors: B or T zero, B no multiple of world, fewer than B (T+1) tokens. */
STX_DEF stx_batches *stx_batches_create(stx_ctx *x, const stx_corpus *c, const stx_batches_desc *d);
STX_DEF void stx_batches_free(stx_batches *b);
STX_DEF size_t stx_batches_rows(const stx_batches *b);              /* rows of this rank, R = B / world */
STX_DEF size_t stx_batches_stream(const stx_batches *b);            /* n, tokens of a stream */

/* Training block: x[r,t] = row[p+t], y[r,t] = row[p+1+t], both (R,T). STX_BATCH_FRESH: it does not continue the last one
   (first block, or after a wrap), reset the memories. STX_BATCH_OK: it does. STX_BATCH_END: only in error.
   After a block p += T; when p >= n - T then p = uniform integer in [0, min(T, n-T)) (the reference of 1905.07799 forgets the
   minimum), drawn from (seed, wraps): the same on every rank and after a resume. */
STX_DEF int stx_batches_next(stx_batches *b, int32_t *x, int32_t *y);
STX_DEF stx_batches_state stx_batches_get(const stx_batches *b);
STX_DEF int stx_batches_set(stx_batches *b, stx_batches_state s);   /* 0 and an error when s does not fit data, B and T */

/* Evaluation pass, from position 0, in order; it has its own cursor and does not move the training position.
     STX_EVAL_ALL      every target except the first token of each stream, once; the last block may be shorter
     STX_EVAL_LITERAL  blocks at 0, T, 2T, .. until p >= n - T, full blocks only (the reference: misses up to T targets)
   next_eval writes (R,t) and t = *T_this <= T, packed; STX_BATCH_FRESH for the first block, STX_BATCH_OK for the others,
   STX_BATCH_END (t = 0) after the last one. */
STX_DEF void stx_batches_rewind(stx_batches *b, int rule);
STX_DEF int stx_batches_next_eval(stx_batches *b, int32_t *x, int32_t *y, size_t *T_this);

#ifdef __cplusplus
}
#endif

/* Stop here if you only want the API. */
#endif /* SEQTX_TEXT_H */

#if (defined(SEQTX_IMPLEMENTATION) || defined(SEQTX_TEXT_IMPLEMENTATION)) && !defined(SEQTX_TEXT_IMPLEMENTATION_DONE)
#define SEQTX_TEXT_IMPLEMENTATION_DONE

#include <stdlib.h>
#include <string.h>

// >>text to pieces

enum { STX__SPECIAL = 5 };              /* the length of both */
static const unsigned char stx__eos[] = "<eos>", stx__unk[] = "<unk>";

static int stx__is_eos(const unsigned char *s, size_t n) { return n == STX__SPECIAL && !memcmp(s, stx__eos, n); }

/* Python's str.isspace, which the references' split() uses */
static int stx__is_white(uint32_t c) {
    return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

typedef struct {
    const unsigned char *s;     /* n bytes, read up to i */
    size_t n, i;
    int kind, eos;              /* STX_TOK_..; whether a line end is <eos> */
    int final;                  /* whether a text that does not end in a line end gets an <eos> */
    int open;                   /* there was something after the last line end */
} stx__scan;

static void stx__scan_begin(stx__scan *c, int kind, int eos, int final, const unsigned char *s, size_t n) {
    memset(c, 0, sizeof *c);
    c->s = s;
    c->n = n;
    c->kind = kind;
    c->eos = eos;
    c->final = final;
}

/* The next piece: 1 and the piece; 0 at the end; -1 when the bytes at i are no UTF-8. */
static int stx__scan_next(stx__scan *c, const unsigned char **piece, size_t *len) {
    while (c->i < c->n) {
        const unsigned char *s = c->s + c->i;
        size_t k = 1, i;
        uint32_t u = *s;
        if (c->kind != STX_TOK_BYTES && (k = stx_utf8(s, c->n - c->i, &u)) == 0) return -1;
        if (c->eos && (u == '\n' || (u == '\r' && c->kind != STX_TOK_BYTES))) {
            c->i += u == '\r' && c->n - c->i > 1 && s[1] == '\n' ? 2 : 1;
            c->open = 0;
            *piece = stx__eos;
            *len = STX__SPECIAL;
            return 1;
        }
        c->open = 1;
        i = c->i;
        c->i += k;
        if (c->kind == STX_TOK_WORDS) {
            if (stx__is_white(u)) continue;
            while (c->i < c->n) {
                if ((k = stx_utf8(c->s + c->i, c->n - c->i, &u)) == 0) return -1;
                if (stx__is_white(u)) break;
                c->i += k;
            }
        }
        *piece = s;
        *len = c->i - i;
        return 1;
    }
    if (!c->open || !c->eos || !c->final) return 0;
    c->open = 0;
    *piece = stx__eos;
    *len = STX__SPECIAL;
    return 1;
}

/* Moves a limit of a byte range forward to where a piece may begin (see the manual). A limit in malformed text
   stays near where it is; reading the text reports it. */
static size_t stx__range_limit(const stx_map *m, int kind, size_t at) {
    const unsigned char *s = m->data;
    size_t n = m->size, k;
    uint32_t u;
    int i;
    if (kind == STX_TOK_BYTES || at == 0) return at;
    for (i = 0; i < 3 && at < n && (s[at] & 0xC0) == 0x80; i++) at++;
    if (at < n && s[at] == '\n' && s[at - 1] == '\r') return at + 1;
    if (kind == STX_TOK_CHARS || s[at - 1] == '\n' || s[at - 1] == '\r') return at;
    for (i = s[at - 1] < 0x80 && stx__is_white(s[at - 1]); at < n; at += k) {       /* i: the word is over */
        if ((k = stx_utf8(s + at, n - at, &u)) == 0 || (i && !stx__is_white(u))) return at;
        if (u == '\r') return at + 1 < n && s[at + 1] == '\n' ? at + 2 : at + 1;
        if (u == '\n') return at + 1;
        i = stx__is_white(u);
    }
    return at;
}

/* The bytes [*begin, *end) of an open file, moved to where pieces begin. 0 and an error when they are outside or none. */
static int stx__range(stx_ctx *x, const stx_map *m, const char *path, int kind, uint64_t begin, uint64_t end, size_t *b, size_t *e) {
    if (!end) end = m->size;
    if (begin > end || end > m->size) {
        stx_fail(x, STX_ERR_ARG, "%s has %zu bytes, the range asked for is %llu to %llu; make it fit the file", path, m->size,
                 (unsigned long long)begin, (unsigned long long)end);
        return 0;
    }
    *b = stx__range_limit(m, kind, (size_t)begin);
    *e = stx__range_limit(m, kind, (size_t)end);
    if (*b == *e) {
        stx_fail(x, STX_ERR_FORMAT, "%s is empty between the bytes %llu and %llu of its %zu; give a file or a range with text in it", path,
                 (unsigned long long)begin, (unsigned long long)end, m->size);
        return 0;
    }
    return 1;
}

// >>vocabulary

typedef struct { const unsigned char *s; size_t n; uint64_t count; size_t first; } stx__piece;

/* Pieces by number and by their bytes: an open hash table of numbers + 1, at most half full. */
typedef struct { stx_ctx *x; stx__piece *p; size_t n; uint32_t *slot; size_t nslot; } stx__dict;

struct stx_vocab {
    stx_ctx *x;
    int kind, compact, has_eos;         /* has_eos: line ends are <eos> */
    int32_t eos, unk;
    stx__dict d;
    unsigned char *pool;                /* the bytes of all pieces */
    int32_t byte_id[256];               /* BYTES: what a byte becomes, -1 when it is not in the vocabulary */
};

static void stx__dict_free(stx__dict *d) {
    stx_block_free(d->x, d->p);
    stx_block_free(d->x, d->slot);
}

/* The slot of a piece, or the empty one where it belongs. */
static size_t stx__dict_slot(const stx__dict *d, const unsigned char *s, size_t n) {
    uint64_t h = 0xCBF29CE484222325u;                       /* FNV-1a, then mixed: the slot is taken from the low bits */
    size_t i, at;
    for (i = 0; i < n; i++) h = (h ^ s[i]) * 0x100000001B3u;
    h ^= h >> 32;
    h *= 0x9E3779B97F4A7C15u;
    h ^= h >> 29;
    for (at = (size_t)h & (d->nslot - 1); d->slot[at]; at = (at + 1) & (d->nslot - 1)) {
        const stx__piece *p = &d->p[d->slot[at] - 1];
        if (p->n == n && !memcmp(p->s, s, n)) break;
    }
    return at;
}
static int32_t stx__dict_find(const stx__dict *d, const unsigned char *s, size_t n) {
    return d->nslot ? (int32_t)d->slot[stx__dict_slot(d, s, n)] - 1 : -1;
}

/* Twice as many slots, and room for half as many pieces. 0 with the error set. */
static int stx__dict_grow(stx__dict *d) {
    size_t nslot = d->nslot ? d->nslot * 2 : 1024, i;
    uint32_t *slot = NULL;
    stx__piece *p = NULL;
    if (nslot <= SIZE_MAX / sizeof *p && d->n < 0x7FFFFFFEu) {
        slot = (uint32_t *)stx_block(d->x, nslot * sizeof *slot);
        p = (stx__piece *)stx_block(d->x, nslot / 2 * sizeof *p);
    }
    if (!slot || !p) {
        stx_block_free(d->x, slot);
        stx_block_free(d->x, p);
        stx_fail(d->x, STX_ERR_MEMORY, "a vocabulary of more than %zu pieces is too large", d->n);
        return 0;
    }
    if (d->n) memcpy(p, d->p, d->n * sizeof *p);
    stx__dict_free(d);
    d->p = p;
    d->slot = slot;
    d->nslot = nslot;
    for (i = 0; i < d->n; i++) slot[stx__dict_slot(d, p[i].s, p[i].n)] = (uint32_t)i + 1;
    return 1;
}
/* The number of a piece, which is appended when it is new (its bytes are not copied). -1 with the error set. */
static int32_t stx__dict_add(stx__dict *d, const unsigned char *s, size_t n) {
    stx__piece *p;
    size_t at;
    if ((uint64_t)n > 0xFFFFFFFFu) {
        stx_fail(d->x, STX_ERR_FORMAT, "a piece of %zu bytes is too long for a vocabulary", n);
        return -1;
    }
    if (d->n >= d->nslot / 2 && !stx__dict_grow(d)) return -1;
    at = stx__dict_slot(d, s, n);
    if (d->slot[at]) return (int32_t)d->slot[at] - 1;
    p = d->p + d->n++;
    p->s = s;
    p->n = n;
    p->count = 0;
    p->first = d->n - 1;
    d->slot[at] = (uint32_t)d->n;
    return (int32_t)d->n - 1;
}

/* A vocabulary of V pieces in this order, copied. */
static stx_vocab *stx__vocab_make(stx_ctx *x, int kind, int compact, int has_eos, const stx__piece *p, size_t V) {
    stx_vocab *v = (stx_vocab *)stx_block(x, sizeof *v);
    size_t i, bytes = 0;
    int ok = v != NULL;
    if (!v) return NULL;
    v->x = v->d.x = x;
    v->kind = kind;
    v->compact = compact;
    v->has_eos = has_eos;
    for (i = 0; i < V; i++) bytes += p[i].n;
    v->pool = (unsigned char *)stx_block(x, bytes + 1);
    ok = v->pool != NULL;
    for (bytes = i = 0; ok && i < V; bytes += p[i++].n) {
        memcpy(v->pool + bytes, p[i].s, p[i].n);
        ok = stx__dict_add(&v->d, v->pool + bytes, p[i].n) >= 0;
    }
    if (!ok) {
        stx_vocab_free(v);
        return NULL;
    }
    v->eos = has_eos ? stx__dict_find(&v->d, stx__eos, STX__SPECIAL) : -1;
    v->unk = stx__dict_find(&v->d, stx__unk, STX__SPECIAL);
    if (kind == STX_TOK_BYTES)
        for (i = 0; i < 256; i++) {
            unsigned char b = (unsigned char)i;
            v->byte_id[i] = has_eos && b == '\n' ? v->eos : stx__dict_find(&v->d, &b, 1);
            if (v->byte_id[i] < 0) v->byte_id[i] = v->unk;
        }
    return v;
}
static stx_vocab *stx__vocab_bytes(stx_ctx *x) {
    unsigned char all[256];
    stx__piece p[256];
    int i;
    memset(p, 0, sizeof p);
    for (i = 0; i < 256; i++) {
        all[i] = (unsigned char)i;
        p[i].s = all + i;
        p[i].n = 1;
    }
    return stx__vocab_make(x, STX_TOK_BYTES, 0, 0, p, 256);
}
static int stx__cmp_later(const void *a, const void *b) {
    const stx__piece *p = (const stx__piece *)a, *q = (const stx__piece *)b;
    if (p->count != q->count) return p->count > q->count ? -1 : 1;
    return p->first > q->first ? -1 : p->first < q->first;
}
static int stx__cmp_earlier(const void *a, const void *b) {
    const stx__piece *p = (const stx__piece *)a, *q = (const stx__piece *)b;
    if (p->count != q->count) return p->count > q->count ? -1 : 1;
    return p->first < q->first ? -1 : p->first > q->first;
}
static void stx__bad_utf8(stx_ctx *x, const char *where, uint64_t at, unsigned c) {
    stx_fail(x, STX_ERR_FORMAT, "%s is not UTF-8: byte %llu (0x%02X) cannot stand there; convert the text (iconv -t UTF-8), or use the "
             "kind bytes", where, (unsigned long long)at, c);
}

/* Drops the pieces seen less than min_count times in favour of <unk>, which is made when the text has none. */
static int stx__dict_prune(stx__dict *d, uint64_t min_count) {
    int32_t unk = stx__dict_add(d, stx__unk, STX__SPECIAL);
    size_t i, n = 0;
    if (unk < 0) return 0;
    for (i = 0; i < d->n; i++)
        if (i != (size_t)unk && d->p[i].count < min_count && !stx__is_eos(d->p[i].s, d->p[i].n)) {
            d->p[unk].count += d->p[i].count;
            d->p[i].n = 0;
        }
    for (i = 0; i < d->n; i++)
        if (d->p[i].n) d->p[n++] = d->p[i];
    d->n = n;                           /* the table no longer fits the numbers; only the list is used from here */
    return 1;
}

/* The list of pieces of a text, in the order wanted. `where` and `base` are for errors. */
static stx_vocab *stx__vocab_count(stx_ctx *x, const stx_vocab_desc *d, const unsigned char *s, size_t n, const char *where,
                                   uint64_t base) {
    stx__dict dict;
    stx__scan c;
    stx_vocab *v = NULL;
    const unsigned char *piece;
    size_t len, i;
    int r;
    memset(&dict, 0, sizeof dict);
    dict.x = x;
    stx__scan_begin(&c, d->kind, d->kind == STX_TOK_WORDS || (d->kind == STX_TOK_CHARS ? d->eos : d->compact), 1, s, n);
    while ((r = stx__scan_next(&c, &piece, &len)) > 0) {
        int32_t id = stx__dict_add(&dict, piece, len);
        if (id < 0) break;
        dict.p[id].count++;
    }
    if (r < 0) stx__bad_utf8(x, where, base + c.i, s[c.i]);
    if (r == 0 && (d->min_count < 2 || stx__dict_prune(&dict, d->min_count))) {
        if (d->order != STX_ORDER_FIRST)
            qsort(dict.p, dict.n, sizeof *dict.p, d->order == STX_ORDER_COUNT_LATER ? stx__cmp_later : stx__cmp_earlier);
        for (i = 0; d->eos_first && c.eos && i < dict.n; i++)
            if (stx__is_eos(dict.p[i].s, dict.p[i].n)) {
                stx__piece e = dict.p[i];
                memmove(dict.p + 1, dict.p, i * sizeof e);
                dict.p[0] = e;
                break;
            }
        v = stx__vocab_make(x, d->kind, d->kind == STX_TOK_BYTES && d->compact, c.eos, dict.p, dict.n);
    }
    stx__dict_free(&dict);
    return v;
}
STX_DEF stx_vocab *stx_vocab_build(stx_ctx *x, const stx_vocab_desc *desc, const char *path, uint64_t begin, uint64_t end) {
    stx_vocab_desc d;
    stx_vocab *v = NULL;
    stx_map m;
    size_t b, e;
    if (!stx_ok(x)) return NULL;
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (d.kind < STX_TOK_BYTES || d.kind > STX_TOK_WORDS || d.order < STX_ORDER_FIRST || d.order > STX_ORDER_COUNT_EARLIER) {
        stx_fail(x, STX_ERR_ARG, "stx_vocab_build: kind %d, order %d; wanted are STX_TOK_BYTES .. STX_TOK_WORDS and STX_ORDER_FIRST .. "
                 "STX_ORDER_COUNT_EARLIER", d.kind, d.order);
        return NULL;
    }
    d.compact = d.compact != 0;
    d.eos = d.eos != 0;
    if (d.kind == STX_TOK_BYTES && !d.compact) return stx__vocab_bytes(x);
    if (!path) { stx_fail(x, STX_ERR_ARG, "stx_vocab_build: the path is NULL; give the training text"); return NULL; }
    if (!stx_map_open(x, &m, path)) return NULL;
    if (stx__range(x, &m, path, d.kind, begin, end, &b, &e)) v = stx__vocab_count(x, &d, m.data + b, e - b, path, b);
    stx_map_close(&m);
    return v;
}
STX_DEF void stx_vocab_free(stx_vocab *v) {
    if (!v) return;
    stx__dict_free(&v->d);
    stx_block_free(v->x, v->pool);
    stx_block_free(v->x, v);
}
STX_DEF int stx_vocab_kind(const stx_vocab *v) { return v ? v->kind : 0; }
STX_DEF size_t stx_vocab_size(const stx_vocab *v) { return v ? v->d.n : 0; }
STX_DEF int32_t stx_vocab_eos(const stx_vocab *v) { return v ? v->eos : -1; }
STX_DEF int32_t stx_vocab_unk(const stx_vocab *v) { return v ? v->unk : -1; }
STX_DEF int32_t stx_vocab_find(const stx_vocab *v, const char *piece, size_t len) {
    return v && piece ? stx__dict_find(&v->d, (const unsigned char *)piece, len) : -1;
}
STX_DEF const char *stx_vocab_piece(const stx_vocab *v, int32_t id, size_t *len) {
    if (!v || id < 0 || (size_t)id >= v->d.n) return NULL;
    if (len) *len = v->d.p[id].n;
    return (const char *)v->d.p[id].s;
}

/* The id of a piece that stands at byte `at` of `where`; -1 with the error set when there is none, not even <unk>. */
static int32_t stx__vocab_id(const stx_vocab *v, const unsigned char *piece, size_t len, const char *where, uint64_t at) {
    static const char *const what[] = {"byte", "character", "word"};
    char q[STX_QUOTE];
    int32_t id = stx__dict_find(&v->d, piece, len);
    if (id < 0) id = v->unk;
    if (id < 0)
        stx_fail(v->x, STX_ERR_FORMAT, "%s: the %s '%s' at byte %llu is not in the vocabulary (%zu pieces); build the vocabulary from a "
                 "text that has it, or with min_count (--min-count) 2, which makes <unk>%s", where,
                 piece == stx__eos ? "line end" : what[v->kind], stx_quote(q, piece, len), (unsigned long long)at, v->d.n,
                 v->kind == STX_TOK_BYTES ? ", or without compact" : "");
    return id;
}
STX_DEF size_t stx_vocab_encode(const stx_vocab *v, const char *text, size_t len, int32_t *out, size_t cap) {
    stx__scan c;
    const unsigned char *piece;
    size_t n = 0, k;
    int r;
    if (!v || !stx_ok(v->x)) return STX_NPOS;
    if ((len && !text) || (cap && !out)) {
        stx_fail(v->x, STX_ERR_ARG, "stx_vocab_encode: text or out is NULL");
        return STX_NPOS;
    }
    stx__scan_begin(&c, v->kind, v->has_eos, 0, (const unsigned char *)text, len);
    while ((r = stx__scan_next(&c, &piece, &k)) > 0) {
        int32_t id = stx__vocab_id(v, piece, k, "the text to encode", c.i - (piece == stx__eos ? 1 : k));
        if (id < 0) return STX_NPOS;
        if (n < cap) out[n] = id;
        n++;
    }
    if (r < 0) {
        stx__bad_utf8(v->x, "the text to encode", c.i, c.s[c.i]);
        return STX_NPOS;
    }
    return n;
}
STX_DEF size_t stx_vocab_decode(const stx_vocab *v, const int32_t *ids, size_t n, char *out, size_t cap) {
    size_t i, k, at = 0;
    if (!v || !stx_ok(v->x)) return STX_NPOS;
    if ((n && !ids) || (cap && !out)) {
        stx_fail(v->x, STX_ERR_ARG, "stx_vocab_decode: ids or out is NULL");
        return STX_NPOS;
    }
    for (i = 0; i < n; i++) {
        const char *s = stx_vocab_piece(v, ids[i], &k);
        if (!s) {
            stx_fail(v->x, STX_ERR_ARG, "stx_vocab_decode: id %ld at place %zu is not in a vocabulary of %zu", (long)ids[i], i, v->d.n);
            return STX_NPOS;
        }
        if (ids[i] == v->eos) { s = "\n"; k = 1; }
        if (at < cap) memcpy(out + at, s, k < cap - at ? k : cap - at);
        at += k;
        if (v->kind == STX_TOK_WORDS && ids[i] != v->eos) {
            if (at < cap) out[at] = ' ';
            at++;
        }
    }
    return at;
}

/* A little-endian number of n bytes */
static uint64_t stx__little(const unsigned char *s, size_t n) {
    uint64_t v = 0;
    while (n--) v = v << 8 | s[n];
    return v;
}
static unsigned char *stx__little_put(unsigned char *o, uint64_t v, size_t n) {
    for (; n; n--, v >>= 8) *o++ = (unsigned char)(v & 0xFF);
    return o;
}
/* Blob: "STXV", version 1, kind, flags (1 compact, 2 eos), 0, V as 8 bytes, then per piece its length as 4 bytes and its
   bytes; little-endian. */
STX_DEF size_t stx_vocab_save(const stx_vocab *v, void *out, size_t cap) {
    unsigned char *o = (unsigned char *)out;
    size_t n = 16, i;
    if (!v) return 0;
    for (i = 0; i < v->d.n; i++) n += 4 + v->d.p[i].n;
    if (!out || cap < n) return n;
    memcpy(o, "STXV\1", 5);
    o[5] = (unsigned char)v->kind;
    o[6] = (unsigned char)(v->compact | v->has_eos << 1);
    o[7] = 0;
    for (o = stx__little_put(o + 8, v->d.n, 8), i = 0; i < v->d.n; i++) {
        o = stx__little_put(o, v->d.p[i].n, 4);
        memcpy(o, v->d.p[i].s, v->d.p[i].n);
        o += v->d.p[i].n;
    }
    return n;
}

/* Whether a vocabulary with these settings can have this piece. */
static int stx__piece_valid(int kind, int has_eos, const unsigned char *s, size_t n) {
    size_t i, k;
    uint32_t u;
    int special = (n == STX__SPECIAL && !memcmp(s, stx__unk, n)) || (has_eos && stx__is_eos(s, n));
    if (special || !n) return special;
    if (kind == STX_TOK_BYTES) return n == 1 && *s != '\n';
    for (i = 0; i < n; i += k)
        if ((k = stx_utf8(s + i, n - i, &u)) == 0 || (kind == STX_TOK_WORDS ? stx__is_white(u) : k != n) ||
            (has_eos && (u == '\n' || u == '\r'))) return 0;
    return 1;
}
STX_DEF stx_vocab *stx_vocab_load(stx_ctx *x, const void *blob, size_t len) {
    const unsigned char *s = (const unsigned char *)blob;
    stx__piece *p;
    stx_vocab *v = NULL;
    const char *why = NULL;
    size_t at = 16, i;
    uint64_t V;
    int kind, compact, has_eos;
    if (!stx_ok(x)) return NULL;
    if (!s || len < 16 || memcmp(s, "STXV", 4)) {
        stx_fail(x, STX_ERR_FORMAT, "this is not a stored vocabulary (%zu bytes without its mark); give the bytes that "
                 "stx_vocab_save wrote", s ? len : 0);
        return NULL;
    }
    kind = s[5];
    compact = s[6] & 1;
    has_eos = s[6] >> 1;
    V = stx__little(s + 8, 8);
    if (s[4] != 1 || s[7]) why = "it was written by another version";
    else if (kind > STX_TOK_WORDS || has_eos > 1 || (kind == STX_TOK_BYTES ? has_eos != compact : compact) ||
             (kind == STX_TOK_WORDS && !has_eos))
        why = "its kind and flags do not fit together";
    else if (!V || V > 0x7FFFFFFF || V > (len - 16) / 5) why = "its size does not fit its length";
    else if (kind == STX_TOK_BYTES && !compact) {
        v = stx__vocab_bytes(x);
        if (v && (stx_vocab_save(v, NULL, 0) != len || V != 256)) why = "its size does not fit its length";
        for (i = 0; v && !why && i < 256; i++, at += 5)
            if (stx__little(s + at, 4) != 1 || s[at + 4] != i) why = "its bytes are not in order";
    } else if ((p = (stx__piece *)stx_block(x, (size_t)V * sizeof *p)) != NULL) {
        for (i = 0; i < (size_t)V && !why; i++) {
            size_t n = len - at < 4 ? 0 : (size_t)stx__little(s + at, 4);
            if (len - at < 4 || n > len - at - 4) { why = "it is cut short"; break; }
            if (!stx__piece_valid(kind, has_eos, s + at + 4, n)) { why = "it has a piece that its kind cannot have"; break; }
            p[i].s = s + at + 4;
            p[i].n = n;
            at += 4 + n;
        }
        if (!why && at != len) why = "there is something behind its end";
        if (!why) v = stx__vocab_make(x, kind, compact, has_eos, p, (size_t)V);
        if (v && v->d.n != (size_t)V) why = "it has a piece twice";
        stx_block_free(x, p);
    }
    if (why) {
        stx_fail(x, STX_ERR_FORMAT, "a stored vocabulary of %zu bytes is damaged: %s", len, why);
        stx_vocab_free(v);
        v = NULL;
    }
    return v;
}

// >>corpus

struct stx_corpus {
    stx_ctx *x;
    stx_map map;                    /* BYTES: the file */
    const unsigned char *bytes;     /* .. and the range in it */
    size_t nbytes, size;            /* size = tokens */
    int32_t byte_id[256], eos;      /* .. what its bytes become, and the last token when size = nbytes + 1 */
    uint16_t *tok16;                /* CHARS, WORDS: one of these */
    int32_t *tok32;
    const int32_t *own;             /* wrapped */
    uint64_t raw;
};

/* Tokens of [b, e) into the corpus: counts them, allocates, fills. */
static int stx__corpus_fill(stx_corpus *c, const stx_vocab *v, const unsigned char *s, size_t n, const char *path, size_t base) {
    stx__scan k;
    const unsigned char *piece;
    size_t len, i;
    int r;
    stx__scan_begin(&k, v->kind, v->has_eos, 1, s, n);
    while ((r = stx__scan_next(&k, &piece, &len)) > 0) c->size++;
    if (r < 0) { stx__bad_utf8(c->x, path, (uint64_t)base + k.i, s[k.i]); return 0; }
    if (c->size > SIZE_MAX / sizeof *c->tok32) { stx_fail(c->x, STX_ERR_MEMORY, "%s: %zu tokens are too many", path, c->size); return 0; }
    if (v->d.n <= 65536) c->tok16 = (uint16_t *)stx_block(c->x, c->size * sizeof *c->tok16);
    else c->tok32 = (int32_t *)stx_block(c->x, c->size * sizeof *c->tok32);
    if (!c->tok16 && !c->tok32) return 0;
    stx__scan_begin(&k, v->kind, v->has_eos, 1, s, n);
    for (i = 0; i < c->size && stx__scan_next(&k, &piece, &len) > 0; i++) {
        int32_t id = stx__vocab_id(v, piece, len, path, (uint64_t)base + k.i - (piece == stx__eos ? 1 : len));
        if (id < 0) return 0;
        if (c->tok16) c->tok16[i] = (uint16_t)id;
        else c->tok32[i] = id;
    }
    return 1;
}
STX_DEF stx_corpus *stx_corpus_open(stx_ctx *x, const stx_vocab *v, const char *path, uint64_t begin, uint64_t end) {
    stx_corpus *c;
    size_t b = 0, e = 0, i;
    int ok;
    if (!stx_ok(x) || !v) return NULL;
    if (!path) { stx_fail(x, STX_ERR_ARG, "stx_corpus_open: the path is NULL; give a text file"); return NULL; }
    if ((c = (stx_corpus *)stx_block(x, sizeof *c)) == NULL) return NULL;
    c->x = x;
    ok = stx_map_open(x, &c->map, path) && stx__range(x, &c->map, path, v->kind, begin, end, &b, &e);
    c->raw = e - b;
    if (ok && v->kind != STX_TOK_BYTES) {
        ok = stx__corpus_fill(c, v, c->map.data + b, e - b, path, b);
        stx_map_close(&c->map);
    } else if (ok) {
        c->bytes = c->map.data + b;
        c->size = c->nbytes = e - b;
        c->eos = v->eos;
        memcpy(c->byte_id, v->byte_id, sizeof c->byte_id);
        for (i = 0; v->compact && ok && i < c->nbytes; i++)
            if (c->byte_id[c->bytes[i]] < 0)
                ok = stx__vocab_id(v, c->bytes[i] == '\n' ? stx__eos : c->bytes + i, c->bytes[i] == '\n' ? STX__SPECIAL : 1, path,
                                   (uint64_t)b + i) >= 0;
        if (ok && v->compact && c->bytes[c->nbytes - 1] != '\n') {
            c->eos = stx__vocab_id(v, stx__eos, STX__SPECIAL, path, e);
            ok = c->eos >= 0;
            c->size++;
        }
    }
    if (!ok) {
        stx_corpus_close(c);
        c = NULL;
    }
    return c;
}
STX_DEF stx_corpus *stx_corpus_wrap(stx_ctx *x, const int32_t *tokens, size_t n, uint64_t raw_bytes) {
    stx_corpus *c;
    if (!stx_ok(x)) return NULL;
    if (!tokens || !n) { stx_fail(x, STX_ERR_ARG, "stx_corpus_wrap: no tokens"); return NULL; }
    if ((c = (stx_corpus *)stx_block(x, sizeof *c)) == NULL) return NULL;
    c->x = x;
    c->own = tokens;
    c->size = n;
    c->raw = raw_bytes;
    return c;
}
STX_DEF void stx_corpus_close(stx_corpus *c) {
    stx_ctx *x;
    if (!c) return;
    x = c->x;
    stx_map_close(&c->map);
    stx_block_free(x, c->tok16);
    stx_block_free(x, c->tok32);
    stx_block_free(x, c);
}
STX_DEF size_t stx_corpus_size(const stx_corpus *c) { return c ? c->size : 0; }
STX_DEF uint64_t stx_corpus_bytes(const stx_corpus *c) { return c ? c->raw : 0; }
STX_DEF int stx_corpus_read(const stx_corpus *c, size_t pos, size_t n, int32_t *out) {
    size_t i;
    if (!c || !stx_ok(c->x)) return 0;
    if (pos > c->size || n > c->size - pos || (n && !out)) {
        stx_fail(c->x, STX_ERR_ARG, "stx_corpus_read: tokens %zu to %zu + %zu of %zu%s", pos, pos, n, c->size, out ? "" : " into NULL");
        return 0;
    }
    if (c->own) memcpy(out, c->own + pos, n * sizeof *out);
    else if (c->tok16) for (i = 0; i < n; i++) out[i] = c->tok16[pos + i];
    else if (c->tok32) memcpy(out, c->tok32 + pos, n * sizeof *out);
    else for (i = 0; i < n; i++) out[i] = pos + i < c->nbytes ? c->byte_id[c->bytes[pos + i]] : c->eos;
    return 1;
}

// >>batches

#define STX__BATCH_STREAM 0x6261746368657321u       /* keeps these numbers apart from all others of the same seed */

struct stx_batches {
    stx_ctx *x;
    const stx_corpus *c;
    size_t T, n, row0, rows;
    uint64_t seed;
    stx_batches_state s;
    size_t eval;                    /* position of the evaluation pass */
    int rule;
};

STX_DEF stx_batches *stx_batches_create(stx_ctx *x, const stx_corpus *c, const stx_batches_desc *d) {
    stx_batches *b;
    size_t world;
    if (!stx_ok(x) || !c) return NULL;
    if (!d || !d->B || !d->T) {
        stx_fail(x, STX_ERR_ARG, "stx_batches_create: B = %zu streams of blocks of T = %zu tokens; both must be at least 1", d ? d->B : 0,
                 d ? d->T : 0);
        return NULL;
    }
    world = d->world ? d->world : 1;
    if (d->rank >= world || d->B % world) {
        stx_fail(x, STX_ERR_ARG, "stx_batches_create: B = %zu streams cannot be shared by rank %zu of %zu; make B a multiple of the number "
                 "of ranks", d->B, d->rank, world);
        return NULL;
    }
    if (d->T >= c->size / d->B) {
        size_t T1 = d->T + 1;
        if (!T1 || d->B > SIZE_MAX / T1)
            stx_fail(x, STX_ERR_ARG, "the data are too short: %zu tokens for %zu streams of blocks of %zu, more than can be counted; use a "
                     "smaller batch size or block length", c->size, d->B, d->T);
        else
            stx_fail(x, STX_ERR_ARG, "the data are too short: %zu tokens, and %zu streams of blocks of %zu need at least %zu = B (T + 1); "
                     "use more data, or a smaller batch size or block length", c->size, d->B, d->T, d->B * T1);
        return NULL;
    }
    if ((b = (stx_batches *)stx_block(x, sizeof *b)) == NULL) return NULL;
    b->x = x;
    b->c = c;
    b->T = d->T;
    b->n = c->size / d->B;
    b->rows = d->B / world;
    b->row0 = d->rank * b->rows;
    b->seed = d->seed;
    b->s.fresh = 1;
    return b;
}
STX_DEF void stx_batches_free(stx_batches *b) {
    if (b) stx_block_free(b->x, b);
}
STX_DEF size_t stx_batches_rows(const stx_batches *b) { return b ? b->rows : 0; }
STX_DEF size_t stx_batches_stream(const stx_batches *b) { return b ? b->n : 0; }
static int stx__batches_read(const stx_batches *b, size_t p, size_t T, int32_t *x, int32_t *y) {
    size_t r;
    for (r = 0; r < b->rows; r++) {
        size_t at = (b->row0 + r) * b->n + p;
        if (!stx_corpus_read(b->c, at, T, x + r * T) || !stx_corpus_read(b->c, at + 1, T, y + r * T)) return 0;
    }
    return 1;
}
STX_DEF int stx_batches_next(stx_batches *b, int32_t *x, int32_t *y) {
    int fresh;
    if (!b || !stx_ok(b->x)) return STX_BATCH_END;
    if (!x || !y) { stx_fail(b->x, STX_ERR_ARG, "stx_batches_next: x or y is NULL"); return STX_BATCH_END; }
    if (!stx__batches_read(b, (size_t)b->s.p, b->T, x, y)) return STX_BATCH_END;
    fresh = b->s.fresh;
    b->s.fresh = 0;
    b->s.p += b->T;
    if (b->s.p >= b->n - b->T) {
        uint32_t u[4];
        uint64_t most = b->T < b->n - b->T ? b->T : b->n - b->T;
        stx_philox(b->seed ^ STX__BATCH_STREAM, 0, ++b->s.wraps, u);
        b->s.p = ((uint64_t)u[1] << 32 | u[0]) % most;
        b->s.fresh = 1;
    }
    return fresh ? STX_BATCH_FRESH : STX_BATCH_OK;
}
STX_DEF stx_batches_state stx_batches_get(const stx_batches *b) {
    stx_batches_state s;
    memset(&s, 0, sizeof s);
    return b ? b->s : s;
}
STX_DEF int stx_batches_set(stx_batches *b, stx_batches_state s) {
    if (!b || !stx_ok(b->x)) return 0;
    if (s.p >= b->n - b->T || s.fresh < 0 || s.fresh > 1 || (!s.fresh && s.p < b->T)) {
        stx_fail(b->x, STX_ERR_ARG, "stx_batches_set: position %llu (%s) cannot be in streams of %zu tokens and blocks of %zu; resume with "
                 "the data, batch size and block length of the saved run, or start at position 0", (unsigned long long)s.p,
                 s.fresh ? "fresh" : "continued", b->n, b->T);
        return 0;
    }
    b->s = s;
    return 1;
}
STX_DEF void stx_batches_rewind(stx_batches *b, int rule) {
    if (!b) return;
    b->eval = 0;
    b->rule = rule;
}
STX_DEF int stx_batches_next_eval(stx_batches *b, int32_t *x, int32_t *y, size_t *T_this) {
    size_t p, T;
    if (T_this) *T_this = 0;
    if (!b || !stx_ok(b->x)) return STX_BATCH_END;
    if (!x || !y || !T_this || b->rule < STX_EVAL_ALL || b->rule > STX_EVAL_LITERAL) {
        stx_fail(b->x, STX_ERR_ARG, "stx_batches_next_eval: x, y or T_this is NULL, or rule %d is none", b->rule);
        return STX_BATCH_END;
    }
    p = b->eval;
    if (p >= (b->rule == STX_EVAL_LITERAL ? b->n - b->T : b->n - 1)) return STX_BATCH_END;
    T = b->T < b->n - 1 - p ? b->T : b->n - 1 - p;
    if (!stx__batches_read(b, p, T, x, y)) return STX_BATCH_END;
    *T_this = T;
    b->eval = p + T;
    return p ? STX_BATCH_OK : STX_BATCH_FRESH;
}

#endif /* SEQTX_TEXT_IMPLEMENTATION */
