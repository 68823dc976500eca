/* seqtx_text.h - v0.2 - text as tokens: vocabularies, tokenised files, batches
   no warranty implied; MIT or public domain, your choice (end of seqtx.h)

   In ONE .c (or .cpp) file:                everywhere else:
       #define SEQTX_IMPLEMENTATION             #include "seqtx_attn_span.h"
       #include "seqtx_attn_span.h"             #include "seqtx_text.h"
       #include "seqtx_text.h"

   This header depends only on seqtx.h. Include it after the family headers that you
   use. Without a family header, it includes seqtx.h, which must be in the same
   directory or on the include path. Link with -lm (and with -pthread if glibc is older
   than 2.34). If another file already implements seqtx.h, define
   SEQTX_TEXT_IMPLEMENTATION instead, which compiles only the implementation in this
   header.

   The models take token ids and do not need this header. The trainers read text with it.

   MANUAL

     From text to batches:

       text file               --stx_vocab_build-->     vocabulary
       text file, vocabulary   --stx_corpus_open-->     tokens
       tokens                  --stx_batches_create-->  batches
       batches                 --stx_batches_next-->    x, y (R,T)

     Kinds of tokens (V is the size of the vocabulary):

       STX_TOK_BYTES           all 256 bytes (V = 256)
         with compact          the distinct bytes of the training text; byte 10 is <eos>
                               (enwik8 in the reference code: V = 205)
       STX_TOK_CHARS           the distinct Unicode code points of the training text
         with eos              the same, and a line end is <eos> (text8: V = 28)
       STX_TOK_WORDS           each line split at Unicode white space, then <eos>
                               (WikiText-103: V = 267735)
       STX_TOK_PIECES          each line split by a SentencePiece model, then its
                               end-of-sentence piece. Encoding requires the SentencePiece
                               library (SEQTX_SENTENCEPIECE and spm.cpp), decoding does
                               not
         with join_lines       without the end-of-sentence piece
       STX_TOK_IDS             the text is a list of piece ids separated by white space;
                               the pieces are read from a .vocab file

     Lines end with \n, \r or \r\n (with compact, only with \n). If the kind has an <eos>
     and the text does not end with a line end, one <eos> is appended, as in the reference
     code.

     Text must be UTF-8. A byte-order mark at the start of a file, a .vocab file or a text
     to encode is skipped. UTF-16 and UTF-32, with or without a mark, are rejected with an
     error that says how to convert the file. BYTES reads any file unchanged: a mark
     becomes three tokens. stx_text_encoding detects UTF-16 and UTF-32.

     SentencePiece marks the start of a word with U+2581, which decodes to a space. The
     decoder keeps this space at the start of a line; the caller may remove it.

     A byte range [begin, end) selects a part of a file, for example for training,
     validation and test; end = 0 means the end of the file. Except with BYTES, a boundary
     inside a character or inside \r\n moves forward to its end. With WORDS, PIECES and
     IDS, a boundary moves to the next word or line. The start and the end of a range move
     in the same way, so adjacent ranges neither lose nor share text.

     The caller owns all objects created here and must free them before the context. All
     functions accept NULL as their object, and do nothing if the context has an error.
     They report errors through the context: STX_ERR_IO if a file cannot be read,
     STX_ERR_FORMAT if its contents are invalid, STX_ERR_ARG for a wrong argument.

   QUICK START (compiles as is): reads the words of this file in batches of two streams.

   //>quickstart
     #define SEQTX_IMPLEMENTATION
     #include "seqtx_text.h"
     #include <stdio.h>

     int main(void) {
         stx_ctx *x = stx_create(NULL);
         stx_vocab_desc vd = {0};
         stx_batches_desc bd = {0};
         int32_t in[2 * 8], next[2 * 8];
         char text[500];

         vd.kind = STX_TOK_WORDS;
         vd.min_count = 2;
         stx_vocab *v = stx_vocab_build(x, &vd, __FILE__, 0, 0);
         stx_corpus *c = stx_corpus_open(x, v, __FILE__, 0, 0);
         bd.B = 2;
         bd.T = 8;
         stx_batches *b = stx_batches_create(x, c, &bd);

         for (int step = 0; step < 3; step++) {
             if (stx_batches_next(b, in, next) == STX_BATCH_END) break;
             size_t n = stx_vocab_decode(v, in, 8, text, sizeof text);  // stream 0
             if (n <= sizeof text) printf("batch %d: %.*s\n", step, (int)n, text);
         }
         printf("%zu tokens, %zu words", stx_corpus_size(c), stx_vocab_size(v));
         printf(" %s\n", stx_error(x));
         int ok = stx_ok(x);
         stx_batches_free(b);
         stx_corpus_close(c);
         stx_vocab_free(v);
         stx_destroy(x);
         return !ok;
     }
   //<quickstart

   READING ORDER: stx__scan_next (text to pieces), stx__vocab_count, stx__corpus_fill,
   stx_batches_next.

   TO ADD A KIND OF TOKEN, change stx__scan_next (splits a text into pieces),
   stx__range_limit (finds where a part of a file may start), stx_vocab_decode (joins
   pieces) and stx__piece_valid (checks the pieces of a stored vocabulary). Stored
   vocabularies contain the numeric value of the kind, so add new kinds at the end.
   Tokens from another tokeniser require no change: stx_corpus_wrap takes token ids, and
   STX_TOK_IDS reads them from a file.
*/
#if !defined(SEQTX_H) || (defined(SEQTX_IMPLEMENTATION) && !defined(SEQTX_IMPLEMENTATION_DONE))
  #include "seqtx.h"
#endif

#define STX__LETTERS 1
#include "seqtx.h" /* hides single-letter macros; see the end of seqtx.h */
#ifndef SEQTX_TEXT_H
#define SEQTX_TEXT_H

#ifdef __cplusplus
extern "C" {
#endif


// >>vocabulary

/* stx_vocab_desc.kind: see the manual */
enum { STX_TOK_BYTES, STX_TOK_CHARS, STX_TOK_WORDS, STX_TOK_PIECES, STX_TOK_IDS };

/* stx_vocab_desc.order: how ids are assigned with CHARS, WORDS and compact BYTES */
enum {
    STX_ORDER_FIRST,        /* by first occurrence (Adaptive Span) */
    STX_ORDER_COUNT_LATER,  /* by decreasing count; for equal counts, the LATER the first
                               occurrence, the lower the id (Adaptive Span, adapt_io) */
    STX_ORDER_COUNT_EARLIER /* by decreasing count; for equal counts, the earlier the first
                               occurrence, the lower the id (Transformer-XL) */
};

/* returned by the stx_vocab_encode and stx_vocab_decode functions after an error */
#define STX_NPOS SIZE_MAX

/* Options for building a vocabulary. Zero means default. */
typedef struct stx_vocab_desc {
    int kind;           /* STX_TOK_.. (default: STX_TOK_BYTES) */
    int order;          /* STX_ORDER_.. (default: STX_ORDER_FIRST). Adaptive input and
                           softmax require a COUNT order */
    int compact;        /* BYTES: 1 assigns ids only to bytes that occur; see the manual */
    int eos;            /* CHARS: 1 encodes a line end as <eos> */
    int eos_first;      /* 1: <eos> has id 0 in any order (Transformer-XL on WikiText-103) */
    uint64_t min_count; /* Pieces that occur fewer than min_count times become <unk>. A value of 2
                           or more always adds <unk> to the vocabulary. 0 and 1 keep all
                           pieces. Encoding an unknown piece is then an error, unless
                           the training text contains the word <unk> */
    const char *pieces; /* PIECES: path of a SentencePiece .model. IDS: path of a .vocab
                           file with one piece per line, optionally followed by a tab and
                           a score, as SentencePiece writes it. The score follows the last
                           tab, so pieces can contain tabs. They can also start or end
                           with newlines */
    int join_lines;     /* PIECES: 1 omits the token for line ends (reference code of PAR) */
} stx_vocab_desc;

typedef struct stx_vocab stx_vocab;

/* Builds a vocabulary from the bytes [begin, end) of a file. d = NULL selects
   STX_TOK_BYTES. With PIECES, IDS, and BYTES without compact, the file is not read and
   path may be NULL. Sets an error and returns NULL if the file cannot be read, the
   range is empty or outside the file, or the text for CHARS or WORDS is not UTF-8. */
STX_DEF stx_vocab *stx_vocab_build(stx_ctx *x, const stx_vocab_desc *d, const char *path,
                                   uint64_t begin, uint64_t end);

/* Returns a larger vocabulary, for a model that continues with another text: all pieces
   of v, with the same ids, then those of the bytes [begin, end) of a file that v lacks,
   in the order of their first occurrence. As in stx_vocab_desc, new pieces that occur
   fewer than min_count times are not added and are read as <unk>, and a value of 2 or
   more adds <unk> to a vocabulary without it. An <unk> in v keeps its id. v stays as it
   is. stx_params_load_grown loads the parameters of the smaller model. Only for CHARS,
   WORDS and compact BYTES: the pieces of other kinds do not come from a text. Fails for
   the same reasons as stx_vocab_build. */
STX_DEF stx_vocab *stx_vocab_grow(const stx_vocab *v, const char *path, uint64_t begin,
                                  uint64_t end, uint64_t min_count);
STX_DEF void stx_vocab_free(stx_vocab *v);

STX_DEF int stx_vocab_kind(const stx_vocab *v);    /* STX_TOK_.. */
STX_DEF size_t stx_vocab_size(const stx_vocab *v); /* V, the number of pieces */
STX_DEF int32_t stx_vocab_eos(const stx_vocab *v); /* the id of <eos>, or -1 */
STX_DEF int32_t stx_vocab_unk(const stx_vocab *v); /* the id of <unk>, or -1 */

/* Returns the id of a piece of len bytes, or -1 if the vocabulary does not contain
   it. */
STX_DEF int32_t stx_vocab_find(const stx_vocab *v, const char *piece, size_t len);

/* Returns the bytes of a piece, without a terminating zero, and sets *len to their
   number. The piece of a line end is "<eos>". Returns NULL if the id is out of range. */
STX_DEF const char *stx_vocab_piece(const stx_vocab *v, int32_t id, size_t *len);

/* Encodes len bytes of text as stx_corpus_open does, but does not append <eos> at the
   end, so that a prompt can be continued. Writes at most cap ids and returns their
   total number; use out = NULL and cap = 0 to count them. Returns STX_NPOS, and sets an
   error that names the piece and its position, if a piece is not in the vocabulary and
   there is no <unk>, or if the text is not UTF-8. */
STX_DEF size_t stx_vocab_encode(const stx_vocab *v, const char *text, size_t len, int32_t *out,
                                size_t cap);

/* Like stx_vocab_encode, for a text that continues another one, such as the second line
   of a file: U+FEFF at its start is a character instead of a byte-order mark, and UTF-16
   and UTF-32 are not detected. */
STX_DEF size_t stx_vocab_encode_part(const stx_vocab *v, const char *text, size_t len, int32_t *out,
                                     size_t cap);

/* Decodes n ids. <eos> becomes a line feed, and each word is followed by a space, so
   decoding token by token gives the same text as decoding all tokens at once. Writes at
   most cap bytes, without a terminating zero, and returns their total number. Sets an
   error and returns STX_NPOS if an id is out of range. */
STX_DEF size_t stx_vocab_decode(const stx_vocab *v, const int32_t *ids, size_t n, char *out,
                                size_t cap);

/* Detects UTF-16 and UTF-32 in n bytes of text. Returns iconv's name of the encoding:
   "UTF-16" or "UTF-32" if the text starts with a byte-order mark, or "UTF-16LE",
   "UTF-16BE", "UTF-32LE" or "UTF-32BE" if the zeros in its first 4096 bytes show that
   it has one of these encodings. Returns NULL for UTF-8 and for data that is not
   text. */
STX_DEF const char *stx_text_encoding(const void *text, size_t n);

/* Store a vocabulary as bytes, for a U8 tensor of a checkpoint, and restore it.
   stx_vocab_save writes the bytes if cap is large enough, and always returns their
   number. stx_vocab_load fully validates its input. It sets STX_ERR_FORMAT and returns
   NULL for any data that stx_vocab_save cannot have written. */
STX_DEF size_t stx_vocab_save(const stx_vocab *v, void *out, size_t cap);
STX_DEF stx_vocab *stx_vocab_load(stx_ctx *x, const void *blob, size_t len);

/* stx_vocab_write adds a vocabulary to a file, as the U8 tensor "vocab", for example to
   the file of a model (stx_model_write). stx_vocab_read restores it, and stx_vocab_open
   restores that of the file at path, such as a trainer's checkpoint; the checksum is not
   verified. stx_vocab_write returns 1, and the others a vocabulary for stx_vocab_free.
   After an error, all three return 0 or NULL. */
STX_DEF int stx_vocab_write(stx_writer *w, const stx_vocab *v);
STX_DEF stx_vocab *stx_vocab_read(stx_ctx *x, const stx_file *f);
STX_DEF stx_vocab *stx_vocab_open(stx_ctx *x, const char *path);


// >>corpus

typedef struct stx_corpus stx_corpus;

/* Opens the bytes [begin, end) of a file as tokens. With STX_TOK_BYTES, the file is
   memory-mapped instead of copied, so it can be larger than 4 GiB. Tokens of other
   kinds are stored in 2 bytes if V <= 65536, otherwise in 4. Fails for the same reasons
   as stx_vocab_build and stx_vocab_encode; errors give the position in the file. The
   vocabulary can be freed afterwards. The file must not be truncated while the corpus
   is open. */
STX_DEF stx_corpus *stx_corpus_open(stx_ctx *x, const stx_vocab *v, const char *path,
                                    uint64_t begin, uint64_t end);

/* Creates a corpus from n tokens in the caller's memory, for example the tokens of a
   synthetic task. The tokens are not copied and must outlive the corpus.
   stx_corpus_bytes returns raw_bytes. */
STX_DEF stx_corpus *stx_corpus_wrap(stx_ctx *x, const int32_t *tokens, size_t n,
                                    uint64_t raw_bytes);
STX_DEF void stx_corpus_close(stx_corpus *c);
STX_DEF size_t stx_corpus_size(const stx_corpus *c); /* number of tokens */

/* Returns the number of bytes of the text that was encoded or, for IDS, of the decoded
   text. For any kind of token, the bits per byte of text are
       (nats per token) / ln 2 * stx_corpus_size / stx_corpus_bytes */
STX_DEF uint64_t stx_corpus_bytes(const stx_corpus *c);

/* Copies tokens pos .. pos+n-1 to out. Returns 1. If the range is not inside the corpus,
   sets an error and returns 0. */
STX_DEF int stx_corpus_read(const stx_corpus *c, size_t pos, size_t n, int32_t *out);


// >>batches

/* Return values of stx_batches_next and stx_batches_next_eval. END: there is no batch,
   because of an error or because the evaluation is complete. OK: the batch continues
   the previous one. FRESH: it does not, so memories must be reset before it */
enum { STX_BATCH_END, STX_BATCH_OK, STX_BATCH_FRESH };

/* evaluation rules; see stx_batches_rewind */
enum { STX_EVAL_ALL, STX_EVAL_LITERAL };

/* stx_batches_desc.how: how each of the B streams is read, and how it continues after
   its end */
enum {
    STX_BATCH_STREAMS, /* the stream restarts at a random position below T */
    STX_BATCH_ROLL,    /* the stream restarts at position 0, rotated by a random number of tokens.
                          The first pass is rotated too. A remainder shorter than T is
                          skipped (NVIDIA's Transformer-XL) */
    STX_BATCH_RECORDS  /* the stream consists of records, as in the reference code of PAR; see
                          below */
};

/* STX_BATCH_RECORDS cuts the text into consecutive blocks of S = T+1 tokens and drops the
   remainder: blocks = tokens / S. With stride = blocks / B, row b of record q is block
   q + b stride, for q = 0 .. blocks - (B-1) stride - 1. In the last records, a row may
   therefore reach the first blocks of the next row. x has the first T tokens of a block
   and y the last T, so the first token of a block is never a target, and the last one is
   never an input. Memories must be reset after the last record. */

typedef struct stx_batches_desc {
    size_t B;      /* total number of streams, over all ranks; required */
    size_t T;      /* tokens per stream in a batch; required */
    uint64_t seed; /* seed of random positions and rotations */
    size_t rank;   /* index of this process, which reads rows [rank B/world, (rank+1) B/world) */
    size_t world;  /* number of processes (default: 1) */
    int how;       /* STX_BATCH_.. (default: STX_BATCH_STREAMS) */
    size_t first;  /* index of the first corpus token to read */
    size_t count;  /* number of tokens to read; 0: all from `first` on */
} stx_batches_desc;

/* The state to store so that a run can be resumed. */
typedef struct stx_batches_state {
    uint64_t p;     /* position in the streams */
    uint64_t wraps; /* number of times the streams have restarted */
    int fresh;      /* 1: the next batch does not continue the previous one */
} stx_batches_state;

typedef struct stx_batches stx_batches;

/* Creates B parallel streams for truncated backpropagation. With n = tokens / B, stream b
   has tokens [b n, (b+1) n); the remainder is dropped. The corpus must outlive the
   batches. Sets an error and returns NULL if B or T is 0, B is not a multiple of world,
   or there are fewer than B (T+1) tokens. */
STX_DEF stx_batches *stx_batches_create(stx_ctx *x, const stx_corpus *c, const stx_batches_desc *d);
STX_DEF void stx_batches_free(stx_batches *b);
STX_DEF size_t stx_batches_rows(const stx_batches *b);   /* streams of this rank, R = B / world */
STX_DEF size_t stx_batches_stream(const stx_batches *b); /* n, tokens per stream; RECORDS: T *
                                                            (number of records) */

/* Returns the number of batches from the start to the end of the streams, or 0 if there
   are none or c is NULL. Sets no error. */
STX_DEF size_t stx_batches_epoch(const stx_corpus *c, const stx_batches_desc *d);

/* Reads the next training batch, x and y (R,T):
       x[r,t] = stream[r][p+t]      y[r,t] = stream[r][p+1+t]
   Returns STX_BATCH_FRESH, STX_BATCH_OK, or STX_BATCH_END after an error. With
   STX_BATCH_STREAMS, p advances by T after a batch. If the new p is n - T or more, it
   is replaced by one drawn uniformly from [0, min(T, n-T)); the reference code of
   1905.07799 omits the minimum. The draw depends only on seed and wraps, so it is the
   same on every rank and after a resume. */
STX_DEF int stx_batches_next(stx_batches *b, int32_t *x, int32_t *y);

STX_DEF stx_batches_state stx_batches_get(const stx_batches *b);

/* Restores a state. Returns 1. If the state does not fit the corpus, B and T, sets an
   error and returns 0. */
STX_DEF int stx_batches_set(stx_batches *b, stx_batches_state s);

/* Evaluation reads the streams once, in order, from position 0. The training position
   is separate and does not change. stx_batches_rewind starts an evaluation with one of
   these rules:
       STX_EVAL_ALL      every token except the first of each stream is a target once;
                         the last batch can be shorter
       STX_EVAL_LITERAL  batches of T tokens at p = 0, T, 2T, .. while p < n - T; omits up
                         to T targets, as the reference code does
   With STX_BATCH_RECORDS, both rules read all records in order. With STX_BATCH_ROLL,
   evaluation does not rotate the streams. stx_batches_next_eval writes x and y (R,t)
   without gaps, with t = *T_this <= T. It returns STX_BATCH_FRESH for the first batch,
   STX_BATCH_OK for the others, and STX_BATCH_END, with t = 0, after the last one. */
STX_DEF void stx_batches_rewind(stx_batches *b, int rule);
STX_DEF int stx_batches_next_eval(stx_batches *b, int32_t *x, int32_t *y, size_t *T_this);


// >>sentencepiece

/* The interface to the SentencePiece library, implemented in examples/spm.cpp. Compile
   that file as C++ and link with -lsentencepiece. If SEQTX_SENTENCEPIECE is defined,
   this header calls the first five functions. A function that fails writes the reason
   to err, which has `err_size` bytes. */

/* Types of pieces, which decode to their text, to nothing, to U+2047 and to one byte,
   respectively. */
enum { STX_PIECE_TEXT, STX_PIECE_CONTROL, STX_PIECE_UNKNOWN, STX_PIECE_BYTE };

/* Opens a model from the n bytes of its file. Returns NULL after an error. */
void *stx_spm_open(const void *model, size_t n, char *err, size_t err_size);
void stx_spm_close(void *spm);

/* stx_spm_size returns the number of pieces. It sets *eos and *unk to the ids of the
   end-of-sentence piece and the unknown piece, or to -1. */
size_t stx_spm_size(const void *spm, int32_t *eos, int32_t *unk);
const char *stx_spm_piece(const void *spm, size_t id, size_t *len, int *type);

/* Encodes a line of UTF-8 without its line end. Adds no start or end pieces, and does
   not sample among segmentations. The ids are valid until the next call. Returns 1, or
   0 after an error. */
int stx_spm_encode(void *spm, const char *line, size_t n, const int32_t **ids, size_t *count,
                   char *err, size_t err_size);

/* Trains a model. names and values contain n options of the library's trainer, such as
   input, model_prefix and vocab_size. Returns 1, or 0 after an error. */
int stx_spm_train(const char *const *names, const char *const *values, size_t n, char *err,
                  size_t err_size);

#ifdef __cplusplus
}
#endif

/* Stop here if you only want the API. */
#endif /* SEQTX_TEXT_H */

#if (defined(SEQTX_IMPLEMENTATION) || defined(SEQTX_TEXT_IMPLEMENTATION)) \
    && !defined(SEQTX_TEXT_IMPLEMENTATION_DONE)
#define SEQTX_TEXT_IMPLEMENTATION_DONE

#include <stdlib.h>
#include <string.h>


// >>text to pieces

enum { STX__SPECIAL = 5 }; /* length of <eos> and of <unk> */

static const unsigned char stx__eos[] = "<eos>", stx__unk[] = "<unk>";

static int stx__is_eos(const unsigned char *s, size_t n) {
    return n == STX__SPECIAL && !memcmp(s, stx__eos, n);
}

/* Returns 1 if Python's str.isspace accepts c. The split() of the reference code splits
   at these characters. */
static int stx__is_white(uint32_t c) {
    return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0
           || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029
           || c == 0x202F || c == 0x205F || c == 0x3000;
}

typedef struct {
    const unsigned char *s; /* (n): the text; s[i] is the next byte */
    size_t n, i;
    int kind, eos; /* kind: STX_TOK_.. except PIECES; eos: 1 if a line end is <eos> */
    int final;     /* 1: a text that does not end with a line end gets an <eos> */
    int open;      /* 1: there was text after the last line end */
} stx__scan;

static void stx__scan_begin(stx__scan *c, int kind, int eos, int final, const unsigned char *s,
                            size_t n) {
    memset(c, 0, sizeof *c);
    c->s = s;
    c->n = n;
    c->kind = kind;
    c->eos = eos;
    c->final = final;
}

/* Finds the next piece and returns 1. Returns 0 at the end of the text, and -1 if the
   bytes at c->i are not UTF-8. */
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
        if (c->kind >= STX_TOK_WORDS) {
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

/* Returns 1 if the n bytes at s are UTF-8. The last character may be incomplete. */
static int stx__is_utf8(const unsigned char *s, size_t n) {
    size_t i, k;
    uint32_t u;
    for (i = 0; i < n; i += k)
        if ((k = stx_utf8(s + i, n - i, &u)) == 0) return n - i < 4;
    return 1;
}

/* Returns 1 if the n bytes at s can be UTF-16 text: surrogates are paired, and there
   are no control characters except white space, no private-use characters, and no
   U+FFFE or U+FFFF. */
static int stx__is_utf16(const unsigned char *s, size_t n, int big_endian) {
    int after_high = 0;
    size_t i;
    for (i = 0; i + 2 <= n; i += 2) {
        unsigned u = big_endian ? s[i] * 256u + s[i + 1] : s[i + 1] * 256u + s[i];
        if (after_high != (u >= 0xDC00 && u <= 0xDFFF)) return 0;
        after_high = u >= 0xD800 && u <= 0xDBFF;
        if (u < 0x20 && (u < '\t' || u > '\r')) return 0;
        if ((u >= 0x7F && u <= 0x9F) || (u >= 0xE000 && u <= 0xF8FF) || u >= 0xFFFE) return 0;
    }
    return 1;
}

STX_DEF const char *stx_text_encoding(const void *text, size_t n) {
    const unsigned char *s = (const unsigned char *)text;
    size_t zeros[4] = {0, 0, 0, 0}, even, odd, i;
    if (n >= 4 && (!memcmp(s, "\xFF\xFE\0\0", 4) || !memcmp(s, "\0\0\xFE\xFF", 4))) return "UTF-32";
    if (n >= 2 && (!memcmp(s, "\xFF\xFE", 2) || !memcmp(s, "\xFE\xFF", 2))) return "UTF-16";
    n = (n < 4096 ? n : 4096) / 4 * 4;
    for (i = 0; i < n; i++) zeros[i % 4] += !s[i];
    if (n >= 8 && zeros[3] == n / 4 && zeros[2] > n / 8 && !zeros[0]) return "UTF-32LE";
    if (n >= 8 && zeros[0] == n / 4 && zeros[1] > n / 8 && !zeros[3]) return "UTF-32BE";

    /* UTF-16 units below 256, such as spaces and line ends, have a zero byte. If at least
       one unit in sixteen is below 256, as in most scripts, the text is assumed to be
       UTF-16. Chinese and Japanese text has no spaces. Therefore, text with fewer zeros
       is also accepted if it is valid UTF-16 and invalid UTF-8. */
    even = zeros[0] + zeros[2];
    odd = zeros[1] + zeros[3];
    if (odd >= 2 && odd * 32 >= n && !even) return "UTF-16LE";
    if (even >= 2 && even * 32 >= n && !odd) return "UTF-16BE";
    if (n < 8 || !odd == !even || stx__is_utf8(s, n) || !stx__is_utf16(s, n, even > 0)) return NULL;
    return odd ? "UTF-16LE" : "UTF-16BE";
}

/* Returns the length of the UTF-8 byte-order mark at the start of a text, 0 or 3. If the
   text is UTF-16 or UTF-32, sets an error and returns SIZE_MAX. */
static size_t stx__text_mark(stx_ctx *x, const unsigned char *s, size_t n, const char *where) {
    const char *wide = stx_text_encoding(s, n);
    if (!wide) return n >= 3 && !memcmp(s, "\xEF\xBB\xBF", 3) ? 3 : 0;
    stx_fail(x, STX_ERR_FORMAT, "%s is %s, not UTF-8; convert it: iconv -f %s -t UTF-8 OLD > NEW",
             where, wide, wide);
    return SIZE_MAX;
}

/* Moves the boundary of a byte range forward to where a piece may start (see the manual).
   Stops at malformed text, which causes an error when the text is read. */
static size_t stx__range_limit(const stx_map *m, int kind, size_t at) {
    const unsigned char *s = m->data;
    size_t n = m->size, k;
    uint32_t u;
    int i;
    if (kind == STX_TOK_BYTES || at == 0) return at;
    for (i = 0; i < 3 && at < n && (s[at] & 0xC0) == 0x80; i++) at++;
    if (at < n && s[at] == '\n' && s[at - 1] == '\r') return at + 1;
    if (kind == STX_TOK_CHARS || s[at - 1] == '\n' || s[at - 1] == '\r') return at;
    /* i: 1 if the previous character is white space */
    for (i = s[at - 1] < 0x80 && stx__is_white(s[at - 1]); at < n; at += k) {
        if ((k = stx_utf8(s + at, n - at, &u)) == 0 || (i && !stx__is_white(u))) return at;
        if (u == '\r') return at + 1 < n && s[at + 1] == '\n' ? at + 2 : at + 1;
        if (u == '\n') return at + 1;
        i = stx__is_white(u);
    }
    return at;
}

/* Sets [*b, *e) to the byte range [begin, end) of an open file, with both boundaries
   moved to where pieces start. Sets an error and returns 0 if the range is empty or
   outside the file. */
static int stx__range(stx_ctx *x, const stx_map *m, const char *path, int kind, uint64_t begin,
                      uint64_t end, size_t *b, size_t *e) {
    size_t mark = kind == STX_TOK_BYTES ? 0 : stx__text_mark(x, m->data, m->size, path);
    if (mark == SIZE_MAX) return 0;
    if (!end) end = m->size;
    if (begin > end || end > m->size) {
        stx_fail(x, STX_ERR_ARG,
                 "%s: expected a range inside the %zu bytes of the file, got %llu to %llu", path,
                 m->size, (unsigned long long)begin, (unsigned long long)end);
        return 0;
    }
    *b = stx__range_limit(m, kind, (size_t)begin);
    *e = stx__range_limit(m, kind, (size_t)end);
    if (*b < mark) *b = *e < mark ? *e : mark;
    if (*b == *e) {
        stx_fail(x, STX_ERR_FORMAT,
                 "%s: there is no text between bytes %llu and %llu of %zu; use a file or a range "
                 "with text",
                 path, (unsigned long long)begin, (unsigned long long)end, m->size);
        return 0;
    }
    return 1;
}


// >>vocabulary

typedef struct {
    const unsigned char *s;
    size_t n;
    uint64_t count;
    size_t first;
} stx__piece;

/* A list of pieces, which can be looked up by id or by their bytes. */
typedef struct {
    stx_ctx *x;
    stx__piece *p;  /* (n): the pieces by id */
    size_t n;
    uint32_t *slot; /* (nslot): hash table with open addressing, at most half full. A slot contains
                       an id + 1, or 0 if it is empty */
    size_t nslot;
} stx__dict;

struct stx_vocab {
    stx_ctx *x;
    int kind, compact, has_eos; /* has_eos: 1 if line ends are <eos> */
    int32_t eos, unk;
    stx__dict d;
    unsigned char *pool;      /* the bytes of all pieces */
    int32_t byte_id[256];     /* BYTES: the id of each byte, or -1 */
    unsigned char *type;      /* PIECES, IDS: the STX_PIECE_.. type of each piece */
    unsigned char *text;      /* PIECES, IDS: the decoded pieces */
    size_t *text_at, *text_n; /* PIECES, IDS: offset and length of each piece in `text` */
    unsigned char *model;     /* PIECES: (model_n) contents of the SentencePiece model file */
    size_t model_n;
    void *spm;                /* PIECES: the opened model; NULL without the library */
};

static void stx__dict_free(stx__dict *d) {
    stx_block_free(d->x, d->p);
    stx_block_free(d->x, d->slot);
}

/* Returns the slot of a piece, or the empty slot where it would be added. */
static size_t stx__dict_slot(const stx__dict *d, const unsigned char *s, size_t n) {
    /* FNV-1a hash, followed by mixing, because its low bits select the slot */
    uint64_t h = 0xCBF29CE484222325u;
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

/* Doubles the number of slots. The list can then hold half as many pieces as there are
   slots. Returns 0 after an error. */
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
        stx_fail(d->x, STX_ERR_MEMORY, "out of memory: a vocabulary of %zu pieces cannot grow",
                 d->n);
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

/* Returns the id of a piece, which is appended if it is new, or -1 after an error. The
   bytes of a new piece are not copied. */
static int32_t stx__dict_add(stx__dict *d, const unsigned char *s, size_t n) {
    stx__piece *p;
    size_t at;
    if ((uint64_t)n > 0xFFFFFFFFu) {
        stx_fail(d->x, STX_ERR_FORMAT,
                 "a piece of a vocabulary: expected less than 2^32 bytes, got %zu", n);
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

/* Creates a vocabulary of V pieces in the given order. The pieces are copied. */
static stx_vocab *stx__vocab_make(stx_ctx *x, int kind, int compact, int has_eos,
                                  const stx__piece *p, size_t V) {
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
    stx_fail(x, STX_ERR_FORMAT,
             "%s is not UTF-8: byte %llu (0x%02X) is invalid; convert the text "
             "(iconv -t UTF-8), or use bytes as tokens",
             where, (unsigned long long)at, c);
}


// >>pieces

/* Decodes a piece to out and returns the length of the result: at most the length of
   the piece or 5 bytes, whichever is larger. */
static size_t stx__piece_text(const stx_vocab *v, int32_t id, unsigned char *out) {
    static const unsigned char blank[] = "\xe2\x96\x81", unknown[] = " \xe2\x81\x87 ";
    const unsigned char *s = v->d.p[id].s;
    size_t n = v->d.p[id].n, i, k = 0;
    if (v->type[id] == STX_PIECE_CONTROL) return 0;
    if (v->type[id] == STX_PIECE_UNKNOWN) {
        memcpy(out, unknown, 5);
        return 5;
    }
    if (v->type[id] == STX_PIECE_BYTE) { /* such as <0x41>; see stx__piece_byte */
        static const char hex[] = "0123456789ABCDEF";
        out[0] = (unsigned char)((strchr(hex, s[3]) - hex) * 16 + (strchr(hex, s[4]) - hex));
        return 1;
    }
    for (i = 0; i < n; k++)
        if (n - i >= 3 && !memcmp(s + i, blank, 3)) {
            out[k] = ' ';
            i += 3;
        } else
            out[k] = s[i++];
    return k;
}

/* Returns 1 if a piece is one of <0x00> to <0xFF>. */
static int stx__piece_byte(const unsigned char *s, size_t n) {
    return n == 6 && !memcmp(s, "<0x", 3) && s[5] == '>' && s[3] && s[4]
           && strchr("0123456789ABCDEF", s[3]) && strchr("0123456789ABCDEF", s[4]);
}

/* Opens v->model if this build has the library. Returns 0 after an error. */
static int stx__pieces_open(stx_vocab *v, const char *who) {
#ifdef SEQTX_SENTENCEPIECE
    char err[256];
    int32_t eos, unk;
    size_t V;
    v->spm = stx_spm_open(v->model, v->model_n, err, sizeof err);
    V = v->spm ? stx_spm_size(v->spm, &eos, &unk) : 0;
    if (!v->spm)
        stx_fail(v->x, STX_ERR_FORMAT, "%s is not a SentencePiece model: %s", who, err);
    else if (V != v->d.n) /* ids would not match the vocabulary */
        stx_fail(v->x, STX_ERR_FORMAT,
                 "%s has %zu pieces, but the vocabulary has %zu: the file is damaged", who, V,
                 v->d.n);
    return v->spm && V == v->d.n;
#else
    (void)v;
    (void)who;
    return 1;
#endif
}

/* Creates a vocabulary from pieces and their types, which are copied. eos or unk is -1 if
   there is no such piece. */
static stx_vocab *stx__pieces_make(stx_ctx *x, int kind, int has_eos, const stx__piece *p,
                                   const unsigned char *type, size_t V, int32_t eos, int32_t unk,
                                   const void *model, size_t model_n) {
    stx_vocab *v = stx__vocab_make(x, kind, 0, has_eos, p, V);
    size_t i, bytes = 1;
    if (!v) return NULL;
    v->eos = eos;
    v->unk = unk;
    for (i = 0; i < v->d.n; i++) bytes += v->d.p[i].n + 5;
    v->type = (unsigned char *)stx_block(x, V);
    v->text = (unsigned char *)stx_block(x, bytes);
    v->text_at = (size_t *)stx_block(x, V * sizeof *v->text_at);
    v->text_n = (size_t *)stx_block(x, V * sizeof *v->text_n);
    v->model = model_n ? (unsigned char *)stx_block(x, model_n) : NULL;
    if (!v->type || !v->text || !v->text_at || !v->text_n || (model_n && !v->model)) {
        stx_vocab_free(v);
        return NULL;
    }
    memcpy(v->type, type, V);
    for (bytes = i = 0; i < v->d.n; bytes += v->text_n[i++]) {
        v->text_at[i] = bytes;
        v->text_n[i] = stx__piece_text(v, (int32_t)i, v->text + bytes);
        if ((int32_t)i == eos) {
            v->text[bytes] = '\n';
            v->text_n[i] = 1;
        }
    }
    if (model_n) memcpy(v->model, model, model_n);
    v->model_n = model_n;
    return v;
}

/* Returns v if it has V pieces. Otherwise two pieces were equal: sets an error, frees v
   and returns NULL. */
static stx_vocab *stx__pieces_once(stx_ctx *x, stx_vocab *v, size_t V, const char *path) {
    if (!v || v->d.n == V) return v;
    stx_fail(x, STX_ERR_FORMAT, "%s has the same piece twice", path);
    stx_vocab_free(v);
    return NULL;
}

/* Creates a vocabulary from a SentencePiece model. */
static stx_vocab *stx__pieces_of_model(stx_ctx *x, const stx_map *m, const char *path,
                                       int join_lines) {
#ifdef SEQTX_SENTENCEPIECE
    stx_vocab *v = NULL;
    char err[256];
    int32_t eos, unk;
    void *spm = stx_spm_open(m->data, m->size, err, sizeof err);
    size_t V = spm ? stx_spm_size(spm, &eos, &unk) : 0, i;
    stx__piece *p = V ? (stx__piece *)stx_block(x, V * sizeof *p) : NULL;
    unsigned char *type = V ? (unsigned char *)stx_block(x, V) : NULL;
    if (!spm)
        stx_fail(x, STX_ERR_FORMAT, "%s is not a SentencePiece model: %s", path, err);
    else if (!join_lines && eos < 0)
        stx_fail(x, STX_ERR_FORMAT,
                 "%s has no end-of-sentence piece, which encodes line ends; train a model with "
                 "one, or use join_lines (--join-lines)",
                 path);
    else if (p && type) {
        for (i = 0; i < V; i++) {
            int what;
            p[i].s = (const unsigned char *)stx_spm_piece(spm, i, &p[i].n, &what);
            if (what == STX_PIECE_BYTE && !stx__piece_byte(p[i].s, p[i].n)) what = STX_PIECE_TEXT;
            type[i] = (unsigned char)what;
        }
        v = stx__pieces_make(x, STX_TOK_PIECES, !join_lines, p, type, V, eos, unk, m->data,
                             m->size);
        v = stx__pieces_once(x, v, V, path);
    }
    stx_block_free(x, p);
    stx_block_free(x, type);
    if (v)
        v->spm = spm;
    else if (spm)
        stx_spm_close(spm);
    return v;
#else
    (void)m;
    (void)join_lines;
    stx_fail(x, STX_ERR_ARG,
             "%s: this build has no SentencePiece library; rebuild with make SENTENCEPIECE=1, or "
             "encode the text with another program and use the ids (--tokens ids)",
             path);
    return NULL;
#endif
}

/* Returns 1 if a line of n bytes consists of a piece, a tab and a score. Sets *piece to
   the length of the piece, which can contain tabs. */
static int stx__list_scored(const unsigned char *s, size_t n, size_t *piece) {
    size_t at, i, digits = 0;
    if (n && s[n - 1] == '\r') n--;
    for (at = n; at && s[at - 1] != '\t';) at--;
    for (i = at; i < n; i++) {
        if (!s[i] || !strchr("+-.0123456789eE", s[i])) return 0;
        digits += s[i] >= '0' && s[i] <= '9';
    }
    *piece = at - (at > 0);
    return at > 0 && digits > 0;
}

/* Returns the length of the line at s, without its line end. */
static size_t stx__list_line(const unsigned char *s, const unsigned char *end) {
    const unsigned char *line = s;
    while (s < end && *s != '\n') s++;
    return (size_t)(s - line);
}

/* Reads the next piece of a .vocab file. The piece starts at *s, and *n receives its
   length. Moves *s past the piece's line and adds the number of lines read to *line.
   Returns 0 after an error. If the file has scores, a line without one is the start of
   a piece that contains a newline. This is accepted only if one side of the newline is
   empty. Otherwise, each side could be a separate piece, the first of which has no
   score. */
static int stx__list_next(stx_ctx *x, const char *path, int scored, const unsigned char **s,
                          const unsigned char *end, size_t *n, size_t *line) {
    const unsigned char *at = *s;
    size_t len = stx__list_line(at, end), before, now;
    for (++*line; scored && !stx__list_scored(at, len, &now); ++*line) {
        before = len;
        at += len + 1; /* there is a next line, because the last line has a score */
        len = stx__list_line(at, end);
        if (before && (stx__list_scored(at, len, &now) ? now : len)) {
            stx_fail(x, STX_ERR_FORMAT,
                     "%s: line %zu has no score after a tab, but the last line has one; add a "
                     "score, such as 0",
                     path, *line);
            return 0;
        }
    }
    if (scored)
        *n = (size_t)(at - *s) + now;
    else
        for (*n = 0; *n < len && at[*n] != '\t' && (at[*n] != '\r' || *n + 1 < len);) ++*n;
    if (!*n) stx_fail(x, STX_ERR_FORMAT, "%s: line %zu has no piece", path, *line);
    *s = at + len + 1;
    return *n > 0;
}

/* Creates a vocabulary from a .vocab file. The file does not contain the types of the
   pieces, so control pieces are recognised by their names. */
static stx_vocab *stx__pieces_of_list(stx_ctx *x, const stx_map *m, const char *path) {
    static const char *const control[] = {"<s>",   "</s>",  "<eos>", "<pad>", "[PAD]",
                                          "[BOS]", "[EOS]", "[CLS]", "[SEP]", "[MASK]"};
    size_t mark = stx__text_mark(x, m->data, m->size, path), V = 0, n, i, k, line = 0;
    const unsigned char *s, *end, *last;
    stx_vocab *v = NULL;
    stx__piece *p;
    unsigned char *type;
    int32_t eos = -1, unk = -1;
    int scored;
    if (mark == SIZE_MAX) return NULL;
    if (m->size == mark) {
        stx_fail(x, STX_ERR_FORMAT, "%s is empty; expected a .vocab file with one piece per line",
                 path);
        return NULL;
    }
    s = m->data + mark;
    end = m->data + m->size;
    /* count the lines, an upper limit on the number of pieces */
    for (V = 1, i = 0; s + i + 1 < end; i++) V += s[i] == '\n';
    for (last = end - 1; last > s && last[-1] != '\n';) last--;
    scored = stx__list_scored(last, stx__list_line(last, end), &n);
    p = (stx__piece *)stx_block(x, V * sizeof *p);
    type = (unsigned char *)stx_block(x, V);
    for (i = 0; p && type && s < end; i++) {
        p[i].s = s;
        if (!stx__list_next(x, path, scored, &s, end, &k, &line)) break;
        p[i].n = k;
        type[i] = STX_PIECE_TEXT;
        if (stx__piece_byte(p[i].s, k)) type[i] = STX_PIECE_BYTE;
        if (k == 5 && (!memcmp(p[i].s, "<unk>", 5) || !memcmp(p[i].s, "[UNK]", 5)) && unk < 0) {
            type[i] = STX_PIECE_UNKNOWN;
            unk = (int32_t)i;
        }
        for (n = 0; n < sizeof control / sizeof *control; n++)
            if (strlen(control[n]) == k && !memcmp(control[n], p[i].s, k)) {
                type[i] = STX_PIECE_CONTROL;
                if (eos < 0 && (n == 1 || n == 2 || n == 6)) eos = (int32_t)i;
            }
    }
    V = i;
    if (stx_ok(x)) v = stx__pieces_make(x, STX_TOK_IDS, 0, p, type, V, eos, unk, NULL, 0);
    v = stx__pieces_once(x, v, V, path);
    stx_block_free(x, p);
    stx_block_free(x, type);
    return v;
}

static stx_vocab *stx__pieces_build(stx_ctx *x, const stx_vocab_desc *d) {
    stx_vocab *v = NULL;
    stx_map m;
    if (!d->pieces || !*d->pieces) {
        stx_fail(x, STX_ERR_ARG, "stx_vocab_build: pieces: expected %s (--pieces), got none",
                 d->kind == STX_TOK_IDS ? "a .vocab file" : "a SentencePiece .model");
        return NULL;
    }
    if (!stx_map_open(x, &m, d->pieces)) return NULL;
    v = d->kind == STX_TOK_IDS ? stx__pieces_of_list(x, &m, d->pieces)
                               : stx__pieces_of_model(x, &m, d->pieces, d->join_lines);
    stx_map_close(&m);
    return v;
}

/* Encodes text line by line into *ids, a block with a capacity of *capacity elements that
   grows as needed, and sets *n to the number of ids. If `final` is set, a line end is
   added to a text that does not end with one. `where` and `base` are for error
   messages. Returns 0 after an error. */
static int stx__pieces_encode(const stx_vocab *v, const unsigned char *s, size_t len, int final,
                              const char *where, uint64_t base, int32_t **ids, size_t *n,
                              size_t *capacity) {
    size_t at = 0;
    *n = 0;
    if (!v->spm) {
        stx_fail(v->x, STX_ERR_ARG,
                 "%s: this vocabulary requires SentencePiece, which this build does not have "
                 "(make SENTENCEPIECE=1)",
                 where);
        return 0;
    }
    while (at < len) {
        size_t k, i, count = 0;
        const int32_t *got = NULL;
        uint32_t u;
        int ended;
        for (i = at; i < len && s[i] != '\n' && s[i] != '\r'; i += k)
            if ((k = stx_utf8(s + i, len - i, &u)) == 0) {
                stx__bad_utf8(v->x, where, base + i, s[i]);
                return 0;
            }
#ifdef SEQTX_SENTENCEPIECE
        if (i > at) {
            char err[256];
            if (!stx_spm_encode(v->spm, (const char *)s + at, i - at, &got, &count, err,
                                sizeof err)) {
                stx_fail(v->x, STX_ERR_FORMAT, "%s: the line at byte %llu cannot be encoded: %s",
                         where, (unsigned long long)(base + at), err);
                return 0;
            }
        }
#endif
        ended = i < len || final;
        if (*capacity - *n < count + 1) {
            size_t more = (*n + count + 1) * 2 > 1024 ? (*n + count + 1) * 2 : 1024;
            int32_t *wider = more < SIZE_MAX / 2 / sizeof *wider
                                 ? (int32_t *)stx_block(v->x, more * sizeof *wider)
                                 : NULL;
            if (!wider) {
                stx_fail(v->x, STX_ERR_MEMORY, "%s: out of memory after %zu tokens", where, *n);
                return 0;
            }
            if (*n) memcpy(wider, *ids, *n * sizeof *wider);
            stx_block_free(v->x, *ids);
            *ids = wider;
            *capacity = more;
        }
        if (count) memcpy(*ids + *n, got, count * sizeof *got);
        *n += count;
        if (ended && v->has_eos) (*ids)[(*n)++] = v->eos;
        at = i + (i < len) + (i + 1 < len && s[i] == '\r' && s[i + 1] == '\n');
    }
    return 1;
}

/* Adds the pieces of a text to d and counts them. `where` and `base` are for error
   messages. Returns 0 after an error. */
static int stx__dict_count(stx__dict *d, stx__scan *c, const char *where, uint64_t base) {
    const unsigned char *piece;
    size_t len;
    int r;
    while ((r = stx__scan_next(c, &piece, &len)) > 0) {
        int32_t id = stx__dict_add(d, piece, len);
        if (id < 0) return 0;
        d->p[id].count++;
    }
    if (r < 0) stx__bad_utf8(d->x, where, base + c->i, c->s[c->i]);
    return r == 0;
}

/* Replaces pieces that occur fewer than min_count times with <unk>, which is added if it
   is not among the pieces. Keeps the first `keep` pieces. Returns 0 after an error. */
static int stx__dict_prune(stx__dict *d, size_t keep, uint64_t min_count) {
    int32_t unk = stx__dict_add(d, stx__unk, STX__SPECIAL);
    size_t i, n = 0;
    if (unk < 0) return 0;
    for (i = keep; i < d->n; i++)
        if (i != (size_t)unk && d->p[i].count < min_count && !stx__is_eos(d->p[i].s, d->p[i].n)) {
            d->p[unk].count += d->p[i].count;
            d->p[i].n = 0;
        }
    for (i = 0; i < d->n; i++)
        if (d->p[i].n) d->p[n++] = d->p[i];
    /* the hash table is now invalid, but the caller uses only the list */
    d->n = n;
    return 1;
}

/* Builds the vocabulary of a text, in the order that d specifies. `where` and `base`
   are for error messages. */
static stx_vocab *stx__vocab_count(stx_ctx *x, const stx_vocab_desc *d, const unsigned char *s,
                                   size_t n, const char *where, uint64_t base) {
    stx__dict dict;
    stx__scan c;
    stx_vocab *v = NULL;
    size_t i;
    memset(&dict, 0, sizeof dict);
    dict.x = x;
    stx__scan_begin(&c, d->kind,
                    d->kind == STX_TOK_WORDS || (d->kind == STX_TOK_CHARS ? d->eos : d->compact), 1,
                    s, n);
    if (stx__dict_count(&dict, &c, where, base)
        && (d->min_count < 2 || stx__dict_prune(&dict, 0, d->min_count))) {
        if (d->order != STX_ORDER_FIRST)
            qsort(dict.p, dict.n, sizeof *dict.p,
                  d->order == STX_ORDER_COUNT_LATER ? stx__cmp_later : stx__cmp_earlier);
        for (i = 0; d->eos_first && c.eos && i < dict.n; i++)
            if (stx__is_eos(dict.p[i].s, dict.p[i].n)) {
                stx__piece e = dict.p[i];
                memmove(dict.p + 1, dict.p, i * sizeof e);
                dict.p[0] = e;
                break;
            }
        v = stx__vocab_make(x, d->kind, d->kind == STX_TOK_BYTES && d->compact, c.eos, dict.p,
                            dict.n);
    }
    stx__dict_free(&dict);
    return v;
}

STX_DEF stx_vocab *stx_vocab_build(stx_ctx *x, const stx_vocab_desc *desc, const char *path,
                                   uint64_t begin, uint64_t end) {
    stx_vocab_desc d;
    stx_vocab *v = NULL;
    stx_map m;
    size_t b, e;
    if (!stx_ok(x)) return NULL;
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (d.kind < STX_TOK_BYTES || d.kind > STX_TOK_IDS || d.order < STX_ORDER_FIRST
        || d.order > STX_ORDER_COUNT_EARLIER) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_vocab_build: kind, order: expected STX_TOK_BYTES .. STX_TOK_IDS and "
                 "STX_ORDER_FIRST .. STX_ORDER_COUNT_EARLIER, got %d and %d",
                 d.kind, d.order);
        return NULL;
    }
    d.compact = d.compact != 0;
    d.eos = d.eos != 0;
    if (d.kind == STX_TOK_BYTES && !d.compact) return stx__vocab_bytes(x);
    if (d.kind >= STX_TOK_PIECES) return stx__pieces_build(x, &d);
    if (!path) {
        stx_fail(x, STX_ERR_ARG, "stx_vocab_build: path: expected a training text, got NULL");
        return NULL;
    }
    if (!stx_map_open(x, &m, path)) return NULL;
    if (stx__range(x, &m, path, d.kind, begin, end, &b, &e))
        v = stx__vocab_count(x, &d, m.data + b, e - b, path, b);
    stx_map_close(&m);
    return v;
}

/* Returns 1 if the pieces of v come from a text. Otherwise sets an error and returns
   0. */
static int stx__vocab_grows(const stx_vocab *v) {
    const char *why = "pieces and ids are those of a SentencePiece model";
    if (v->kind < STX_TOK_PIECES && (v->kind != STX_TOK_BYTES || v->compact)) return 1;
    if (v->kind == STX_TOK_BYTES) why = "the vocabulary has all 256 bytes already";
    stx_fail(v->x, STX_ERR_ARG, "stx_vocab_grow: expected words, characters or compact bytes: %s",
             why);
    return 0;
}

STX_DEF stx_vocab *stx_vocab_grow(const stx_vocab *v, const char *path, uint64_t begin,
                                  uint64_t end, uint64_t min_count) {
    stx_ctx *x = v ? v->x : NULL;
    stx_vocab *grown = NULL;
    stx__dict dict;
    stx__scan c;
    stx_map m;
    size_t b, e, i;
    int ok = 1;
    if (!v || !stx_ok(x) || !stx__vocab_grows(v)) return NULL;
    if (!path) {
        stx_fail(x, STX_ERR_ARG, "stx_vocab_grow: path: expected a training text, got NULL");
        return NULL;
    }
    if (!stx_map_open(x, &m, path)) return NULL;
    memset(&dict, 0, sizeof dict);
    dict.x = x;
    for (i = 0; ok && i < v->d.n; i++) ok = stx__dict_add(&dict, v->d.p[i].s, v->d.p[i].n) >= 0;
    if (ok && stx__range(x, &m, path, v->kind, begin, end, &b, &e)) {
        stx__scan_begin(&c, v->kind, v->has_eos, 1, m.data + b, e - b);
        if (stx__dict_count(&dict, &c, path, b)
            && (min_count < 2 || stx__dict_prune(&dict, v->d.n, min_count)))
            grown = stx__vocab_make(x, v->kind, v->compact, v->has_eos, dict.p, dict.n);
    }
    stx__dict_free(&dict);
    stx_map_close(&m);
    return grown;
}

STX_DEF void stx_vocab_free(stx_vocab *v) {
    if (!v) return;
    stx__dict_free(&v->d);
    stx_block_free(v->x, v->pool);
    stx_block_free(v->x, v->type);
    stx_block_free(v->x, v->text);
    stx_block_free(v->x, v->text_at);
    stx_block_free(v->x, v->text_n);
    stx_block_free(v->x, v->model);
#ifdef SEQTX_SENTENCEPIECE
    if (v->spm) stx_spm_close(v->spm);
#endif
    stx_block_free(v->x, v);
}

STX_DEF int stx_vocab_kind(const stx_vocab *v) {
    return v ? v->kind : 0;
}

STX_DEF size_t stx_vocab_size(const stx_vocab *v) {
    return v ? v->d.n : 0;
}

STX_DEF int32_t stx_vocab_eos(const stx_vocab *v) {
    return v ? v->eos : -1;
}

STX_DEF int32_t stx_vocab_unk(const stx_vocab *v) {
    return v ? v->unk : -1;
}

STX_DEF int32_t stx_vocab_find(const stx_vocab *v, const char *piece, size_t len) {
    return v && piece ? stx__dict_find(&v->d, (const unsigned char *)piece, len) : -1;
}

STX_DEF const char *stx_vocab_piece(const stx_vocab *v, int32_t id, size_t *len) {
    if (!v || id < 0 || (size_t)id >= v->d.n) return NULL;
    if (len) *len = v->d.p[id].n;
    return (const char *)v->d.p[id].s;
}

/* Returns the id of the piece at byte `at` of `where`, or the id of <unk> if the piece is
   not in the vocabulary. If <unk> is not in it either, sets an error and returns -1. */
static int32_t stx__vocab_id(const stx_vocab *v, const unsigned char *piece, size_t len,
                             const char *where, uint64_t at) {
    static const char *const what[] = {"byte", "character", "word"};
    char q[STX_QUOTE];
    int32_t id;
    if (v->kind == STX_TOK_IDS) {
        size_t i;
        uint64_t n = 0;
        for (i = 0; i < len && i < 12 && piece[i] >= '0' && piece[i] <= '9'; i++)
            n = n * 10 + (uint64_t)(piece[i] - '0');
        if (i == len && n < v->d.n) return (int32_t)n;
        stx_fail(v->x, STX_ERR_FORMAT,
                 "%s: expected piece ids from 0 to %zu, separated by white space, got '%s' at byte "
                 "%llu",
                 where, v->d.n - 1, stx_quote(q, piece, len), (unsigned long long)at);
        return -1;
    }
    id = stx__dict_find(&v->d, piece, len);
    if (id < 0) id = v->unk;
    if (id < 0)
        stx_fail(v->x, STX_ERR_FORMAT,
                 "%s: the %s '%s' at byte %llu is not in the vocabulary (%zu pieces); build the "
                 "vocabulary from a text that contains it, or with min_count (--min-count) 2, "
                 "which adds <unk>%s",
                 where, piece == stx__eos ? "line end" : what[v->kind], stx_quote(q, piece, len),
                 (unsigned long long)at, v->d.n,
                 v->kind == STX_TOK_BYTES ? ", or without compact" : "");
    return id;
}

static const char stx__to_encode[] = "the text to encode";

/* Returns 1 if the arguments of an encoding function are valid. Otherwise sets an error
   and returns 0. */
static int stx__can_encode(const stx_vocab *v, const char *who, const char *text, size_t len,
                           const int32_t *out, size_t cap) {
    if (!v || !stx_ok(v->x)) return 0;
    if ((!len || text) && (!cap || out)) return 1;
    stx_fail(v->x, STX_ERR_ARG, "%s: %s: expected a buffer, got NULL", who,
             len && !text ? "text" : "out");
    return 0;
}

/* Encodes len bytes of text. `base` is added to the positions in error messages. */
static size_t stx__encode(const stx_vocab *v, const unsigned char *text, size_t len, size_t base,
                          int32_t *out, size_t cap) {
    stx__scan c;
    const unsigned char *piece;
    size_t n = 0, k;
    int r;
    if (v->kind == STX_TOK_PIECES) {
        int32_t *ids = NULL;
        size_t capacity = 0;
        int done = stx__pieces_encode(v, text, len, 0, stx__to_encode, base, &ids, &n, &capacity);
        if (done && n && cap) memcpy(out, ids, (n < cap ? n : cap) * sizeof *out);
        stx_block_free(v->x, ids);
        return done ? n : STX_NPOS;
    }
    stx__scan_begin(&c, v->kind, v->has_eos, 0, text, len);
    while ((r = stx__scan_next(&c, &piece, &k)) > 0) {
        int32_t id =
            stx__vocab_id(v, piece, k, stx__to_encode, base + c.i - (piece == stx__eos ? 1 : k));
        if (id < 0) return STX_NPOS;
        if (n < cap) out[n] = id;
        n++;
    }
    if (r < 0) {
        stx__bad_utf8(v->x, stx__to_encode, base + c.i, c.s[c.i]);
        return STX_NPOS;
    }
    return n;
}

STX_DEF size_t stx_vocab_encode(const stx_vocab *v, const char *text, size_t len, int32_t *out,
                                size_t cap) {
    const unsigned char *s = (const unsigned char *)text;
    size_t mark = 0;
    if (!stx__can_encode(v, "stx_vocab_encode", text, len, out, cap)) return STX_NPOS;
    if (len && v->kind != STX_TOK_BYTES) mark = stx__text_mark(v->x, s, len, stx__to_encode);
    if (mark == SIZE_MAX) return STX_NPOS;
    return stx__encode(v, mark ? s + mark : s, len - mark, mark, out, cap);
}

STX_DEF size_t stx_vocab_encode_part(const stx_vocab *v, const char *text, size_t len, int32_t *out,
                                     size_t cap) {
    if (!stx__can_encode(v, "stx_vocab_encode_part", text, len, out, cap)) return STX_NPOS;
    return stx__encode(v, (const unsigned char *)text, len, 0, out, cap);
}

STX_DEF size_t stx_vocab_decode(const stx_vocab *v, const int32_t *ids, size_t n, char *out,
                                size_t cap) {
    size_t i, k, at = 0;
    if (!v || !stx_ok(v->x)) return STX_NPOS;
    if ((n && !ids) || (cap && !out)) {
        stx_fail(v->x, STX_ERR_ARG, "stx_vocab_decode: %s: expected a buffer, got NULL",
                 n && !ids ? "ids" : "out");
        return STX_NPOS;
    }
    for (i = 0; i < n; i++) {
        const char *s = stx_vocab_piece(v, ids[i], &k);
        if (!s) {
            stx_fail(v->x, STX_ERR_ARG,
                     "stx_vocab_decode: ids[%zu]: expected an id below %zu, got %ld", i, v->d.n,
                     (long)ids[i]);
            return STX_NPOS;
        }
        if (ids[i] == v->eos) {
            s = "\n";
            k = 1;
        } else if (v->type) {
            s = (const char *)v->text + v->text_at[ids[i]];
            k = v->text_n[ids[i]];
        }
        if (at < cap) memcpy(out + at, s, k < cap - at ? k : cap - at);
        at += k;
        if (v->kind == STX_TOK_WORDS && ids[i] != v->eos) {
            if (at < cap) out[at] = ' ';
            at++;
        }
    }
    return at;
}

/* Returns the little-endian integer stored in the n bytes at s. */
static uint64_t stx__little(const unsigned char *s, size_t n) {
    uint64_t v = 0;
    while (n--) v = v << 8 | s[n];
    return v;
}

static unsigned char *stx__little_put(unsigned char *o, uint64_t v, size_t n) {
    for (; n; n--, v >>= 8) *o++ = (unsigned char)(v & 0xFF);
    return o;
}

/* The format of a stored vocabulary. Integers are little-endian; the first column gives
   their size in bytes.
       4        "STXV"
       1 each   version (1), kind, flags (1 compact, 2 eos), 0
       8        V
       then, for each piece:
       4        length of the piece, followed by its bytes
   PIECES and IDS continue with:
       V        the type of each piece, one byte each
       4 each   id of eos + 1, id of unk + 1
       8        length of the model, followed by the model */
STX_DEF size_t stx_vocab_save(const stx_vocab *v, void *out, size_t cap) {
    unsigned char *o = (unsigned char *)out;
    size_t n = 16, i;
    if (!v) return 0;
    for (i = 0; i < v->d.n; i++) n += 4 + v->d.p[i].n;
    if (v->type) n += v->d.n + 16 + v->model_n;
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
    if (v->type) {
        memcpy(o, v->type, v->d.n);
        o = stx__little_put(o + v->d.n, (uint64_t)(v->eos + 1), 4);
        o = stx__little_put(o, (uint64_t)(v->unk + 1), 4);
        o = stx__little_put(o, v->model_n, 8);
        if (v->model_n) memcpy(o, v->model, v->model_n);
    }
    return n;
}

/* Returns 1 if a vocabulary with these settings can contain this piece. */
static int stx__piece_valid(int kind, int has_eos, const unsigned char *s, size_t n) {
    size_t i, k;
    uint32_t u;
    int special = (n == STX__SPECIAL && !memcmp(s, stx__unk, n)) || (has_eos && stx__is_eos(s, n));
    if (kind >= STX_TOK_PIECES) return n > 0;
    if (special || !n) return special;
    if (kind == STX_TOK_BYTES) return n == 1 && *s != '\n';
    for (i = 0; i < n; i += k)
        if ((k = stx_utf8(s + i, n - i, &u)) == 0
            || (kind == STX_TOK_WORDS ? stx__is_white(u) : k != n)
            || (has_eos && (u == '\n' || u == '\r')))
            return 0;
    return 1;
}

/* Reads the n bytes at s that follow the pieces of a stored vocabulary of PIECES or IDS.
   If they are invalid, sets *why to the reason and returns NULL. */
static stx_vocab *stx__pieces_load(stx_ctx *x, int kind, int has_eos, const stx__piece *p, size_t V,
                                   const unsigned char *s, size_t n, const char **why) {
    const unsigned char *type = s;
    uint64_t eos, unk, model;
    size_t i;
    if (n < 16 || n - 16 < V) {
        *why = "it is truncated";
        return NULL;
    }
    s += V;
    eos = stx__little(s, 4);
    unk = stx__little(s + 4, 4);
    model = stx__little(s + 8, 8);
    s += 16;
    n -= 16 + V;
    if (model != n || (kind == STX_TOK_PIECES) != (n > 0))
        *why = "its sizes do not match its length";
    else if (eos > V || unk > V || (has_eos && !eos))
        *why = "it refers to a piece that it does not have";
    for (i = 0; i < V && !*why; i++)
        if (type[i] > STX_PIECE_BYTE
            || (type[i] == STX_PIECE_BYTE && !stx__piece_byte(p[i].s, p[i].n)))
            *why = "it has a piece that is invalid for its kind";
    return *why ? NULL
                : stx__pieces_make(x, kind, has_eos, p, type, V, (int32_t)eos - 1, (int32_t)unk - 1,
                                   s, n);
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
        stx_fail(x, STX_ERR_FORMAT,
                 "stx_vocab_load: expected a stored vocabulary, as written by stx_vocab_save, got "
                 "%zu bytes of other data",
                 s ? len : 0);
        return NULL;
    }
    kind = s[5];
    compact = s[6] & 1;
    has_eos = s[6] >> 1;
    V = stx__little(s + 8, 8);
    if (s[4] != 1 || s[7])
        why = "it was written by another version of seqtx";
    else if (kind > STX_TOK_IDS || has_eos > 1
             || (kind == STX_TOK_BYTES ? has_eos != compact : compact)
             || (kind == STX_TOK_WORDS && !has_eos) || (kind == STX_TOK_IDS && has_eos))
        why = "its kind and flags do not match";
    else if (!V || V > 0x7FFFFFFF || V > (len - 16) / 5)
        why = "its sizes do not match its length";
    else if (kind == STX_TOK_BYTES && !compact) {
        v = stx__vocab_bytes(x);
        if (v && (stx_vocab_save(v, NULL, 0) != len || V != 256))
            why = "its sizes do not match its length";
        for (i = 0; v && !why && i < 256; i++, at += 5)
            if (stx__little(s + at, 4) != 1 || s[at + 4] != i) why = "its bytes are not in order";
    } else if ((p = (stx__piece *)stx_block(x, (size_t)V * sizeof *p)) != NULL) {
        for (i = 0; i < (size_t)V && !why; i++) {
            size_t n = len - at < 4 ? 0 : (size_t)stx__little(s + at, 4);
            if (len - at < 4 || n > len - at - 4) {
                why = "it is truncated";
                break;
            }
            if (!stx__piece_valid(kind, has_eos, s + at + 4, n)) {
                why = "it has a piece that is invalid for its kind";
                break;
            }
            p[i].s = s + at + 4;
            p[i].n = n;
            at += 4 + n;
        }
        if (!why && kind >= STX_TOK_PIECES)
            v = stx__pieces_load(x, kind, has_eos, p, (size_t)V, s + at, len - at, &why);
        else if (!why && at != len)
            why = "it has extra bytes after its end";
        else if (!why)
            v = stx__vocab_make(x, kind, compact, has_eos, p, (size_t)V);
        if (v && v->d.n != (size_t)V) why = "it has the same piece twice";
        if (v && !why && v->model_n && !stx__pieces_open(v, "the model of a stored vocabulary")) {
            stx_vocab_free(v);
            v = NULL;
        }
        stx_block_free(x, p);
    }
    if (why) {
        stx_fail(x, STX_ERR_FORMAT,
                 "stx_vocab_load: the stored vocabulary (%zu bytes) is invalid: %s", len, why);
        stx_vocab_free(v);
        v = NULL;
    }
    return v;
}

STX_DEF int stx_vocab_write(stx_writer *w, const stx_vocab *v) {
    size_t n = stx_vocab_save(v, NULL, 0);
    void *bytes = w && v ? stx_block(v->x, n) : NULL;
    int ok = 0;
    if (bytes) {
        stx_vocab_save(v, bytes, n);
        ok = stx_writer_add_copy(w, "vocab", STX_U8, 1, &n, bytes);
        stx_block_free(v->x, bytes);
    }
    return ok;
}

STX_DEF stx_vocab *stx_vocab_read(stx_ctx *x, const stx_file *f) {
    const stx_entry *e = stx_file_find(f, "vocab");
    stx_vocab *v;
    char text[512];
    if (!stx_ok(x) || !f) return NULL;
    if (!e || e->dtype != STX_U8) {
        stx_fail(x, STX_ERR_FORMAT,
                 "%s: expected a vocabulary, the tensor \"vocab\" of type U8, got %s: give a "
                 "trainer's checkpoint, or a file with stx_vocab_write",
                 stx_file_path(f), e ? e->kind : "none");
        return NULL;
    }
    v = stx_vocab_load(x, e->data, e->bytes);
    if (!v && stx_error_code(x) == STX_ERR_FORMAT) { /* says in which file */
        strncpy(text, stx_error(x), sizeof text - 1);
        text[sizeof text - 1] = 0;
        stx_clear_error(x);
        stx_fail(x, STX_ERR_FORMAT, "%s: %s", stx_file_path(f), text);
    }
    return v;
}

STX_DEF stx_vocab *stx_vocab_open(stx_ctx *x, const char *path) {
    stx_file *f = stx_file_open(x, path);
    stx_vocab *v = stx_vocab_read(x, f);
    stx_file_close(f);
    return v;
}


// >>corpus

struct stx_corpus {
    stx_ctx *x;
    size_t size;                /* number of tokens */
    uint64_t raw;               /* value of stx_corpus_bytes */
    stx_map map;                /* BYTES: the file */
    const unsigned char *bytes; /* BYTES: (nbytes) the selected range of the file */
    size_t nbytes;
    int32_t byte_id[256];       /* BYTES: the id of each byte */
    int32_t eos;                /* BYTES: <eos>, the last token if size = nbytes + 1 */
    uint16_t *tok16;            /* other kinds: (size) the tokens if V <= 65536 */
    int32_t *tok32;             /* other kinds: (size) the tokens if V > 65536 */
    const int32_t *own;         /* stx_corpus_wrap: the caller's tokens */
};

/* Implements stx__corpus_fill for PIECES, encoding the text only once. */
static int stx__corpus_pieces(stx_corpus *c, const stx_vocab *v, const unsigned char *s, size_t n,
                              const char *path, size_t base) {
    int32_t *ids = NULL;
    size_t capacity = 0, i;
    int ok = stx__pieces_encode(v, s, n, 1, path, base, &ids, &c->size, &capacity);
    if (ok && v->d.n <= 65536) {
        c->tok16 = (uint16_t *)stx_block(c->x, (c->size + 1) * sizeof *c->tok16);
        for (i = 0; c->tok16 && i < c->size; i++) c->tok16[i] = (uint16_t)ids[i];
        stx_block_free(c->x, ids);
        return c->tok16 != NULL;
    }
    c->tok32 = ids;
    return ok;
}

/* Counts the tokens in n bytes at s, allocates the token array of the corpus and fills
   it. */
static int stx__corpus_fill(stx_corpus *c, const stx_vocab *v, const unsigned char *s, size_t n,
                            const char *path, size_t base) {
    stx__scan k;
    const unsigned char *piece;
    size_t len, i;
    int r;
    if (v->kind == STX_TOK_PIECES) return stx__corpus_pieces(c, v, s, n, path, base);
    stx__scan_begin(&k, v->kind, v->has_eos, 1, s, n);
    while ((r = stx__scan_next(&k, &piece, &len)) > 0) c->size++;
    if (r < 0) {
        stx__bad_utf8(c->x, path, (uint64_t)base + k.i, s[k.i]);
        return 0;
    }
    if (c->size > SIZE_MAX / sizeof *c->tok32) {
        stx_fail(c->x, STX_ERR_MEMORY, "%s: out of memory for %zu tokens", path, c->size);
        return 0;
    }
    if (v->d.n <= 65536)
        c->tok16 = (uint16_t *)stx_block(c->x, c->size * sizeof *c->tok16);
    else
        c->tok32 = (int32_t *)stx_block(c->x, c->size * sizeof *c->tok32);
    if (!c->tok16 && !c->tok32) return 0;
    stx__scan_begin(&k, v->kind, v->has_eos, 1, s, n);
    for (i = 0; i < c->size && stx__scan_next(&k, &piece, &len) > 0; i++) {
        int32_t id = stx__vocab_id(v, piece, len, path,
                                   (uint64_t)base + k.i - (piece == stx__eos ? 1 : len));
        if (id < 0) return 0;
        if (c->tok16)
            c->tok16[i] = (uint16_t)id;
        else
            c->tok32[i] = id;
    }
    if (v->kind == STX_TOK_IDS)
        for (c->raw = 0, i = 0; i < c->size; i++)
            c->raw += v->text_n[c->tok16 ? c->tok16[i] : c->tok32[i]];
    return 1;
}

STX_DEF stx_corpus *stx_corpus_open(stx_ctx *x, const stx_vocab *v, const char *path,
                                    uint64_t begin, uint64_t end) {
    stx_corpus *c;
    size_t b = 0, e = 0, i;
    int ok;
    if (!stx_ok(x) || !v) return NULL;
    if (!path) {
        stx_fail(x, STX_ERR_ARG, "stx_corpus_open: path: expected a text file, got NULL");
        return NULL;
    }
    if ((c = (stx_corpus *)stx_block(x, sizeof *c)) == NULL) return NULL;
    c->x = x;
    ok = stx_map_open(x, &c->map, path)
         && stx__range(x, &c->map, path, v->kind, begin, end, &b, &e);
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
                ok = stx__vocab_id(v, c->bytes[i] == '\n' ? stx__eos : c->bytes + i,
                                   c->bytes[i] == '\n' ? STX__SPECIAL : 1, path, (uint64_t)b + i)
                     >= 0;
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

STX_DEF stx_corpus *stx_corpus_wrap(stx_ctx *x, const int32_t *tokens, size_t n,
                                    uint64_t raw_bytes) {
    stx_corpus *c;
    if (!stx_ok(x)) return NULL;
    if (!tokens || !n) {
        stx_fail(x, STX_ERR_ARG, "stx_corpus_wrap: expected at least one token, got none");
        return NULL;
    }
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

STX_DEF size_t stx_corpus_size(const stx_corpus *c) {
    return c ? c->size : 0;
}

STX_DEF uint64_t stx_corpus_bytes(const stx_corpus *c) {
    return c ? c->raw : 0;
}

STX_DEF int stx_corpus_read(const stx_corpus *c, size_t pos, size_t n, int32_t *out) {
    size_t i;
    if (!c || !stx_ok(c->x)) return 0;
    if (pos > c->size || n > c->size - pos || (n && !out)) {
        stx_fail(c->x, STX_ERR_ARG,
                 "stx_corpus_read: expected a range inside the %zu tokens, got %zu tokens from "
                 "position %zu%s",
                 c->size, n, pos, out ? "" : ", and out = NULL");
        return 0;
    }
    if (c->own)
        memcpy(out, c->own + pos, n * sizeof *out);
    else if (c->tok16)
        for (i = 0; i < n; i++) out[i] = c->tok16[pos + i];
    else if (c->tok32)
        memcpy(out, c->tok32 + pos, n * sizeof *out);
    else
        for (i = 0; i < n; i++)
            out[i] = pos + i < c->nbytes ? c->byte_id[c->bytes[pos + i]] : c->eos;
    return 1;
}


// >>batches

/* selects a random stream for batches, separate from all others with the same seed */
#define STX__BATCH_STREAM 0x6261746368657321u

struct stx_batches {
    stx_ctx *x;
    const stx_corpus *c;
    size_t T, n;       /* T: tokens per stream in a batch; n: stride between streams */
    size_t row0, rows; /* the first stream of this rank, and the number of its streams */
    size_t first;      /* index of the corpus token at which the first stream starts */
    size_t records;    /* STX_BATCH_RECORDS: number of records; p advances by T per record */
    int how;
    uint64_t seed;
    stx_batches_state s;
    size_t eval; /* position of the evaluation pass */
    int rule;
};

/* Returns the number of corpus tokens that d selects. */
static size_t stx__batches_tokens(const stx_corpus *c, const stx_batches_desc *d) {
    size_t left = c && d->first < c->size ? c->size - d->first : 0;
    return d->count && d->count < left ? d->count : left;
}

STX_DEF stx_batches *stx_batches_create(stx_ctx *x, const stx_corpus *c,
                                        const stx_batches_desc *d) {
    stx_batches *b;
    size_t world, tokens;
    if (!stx_ok(x) || !c) return NULL;
    if (!d || !d->B || !d->T || d->how < STX_BATCH_STREAMS || d->how > STX_BATCH_RECORDS) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_batches_create: expected B and T of at least 1, and how from "
                 "STX_BATCH_STREAMS to STX_BATCH_RECORDS, got B = %zu, T = %zu, how = %d",
                 d ? d->B : 0, d ? d->T : 0, d ? d->how : 0);
        return NULL;
    }
    if (d->first > c->size || d->count > c->size - d->first) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_batches_create: first, count: expected a range inside the %zu tokens, got "
                 "%zu tokens from position %zu",
                 c->size, d->count, d->first);
        return NULL;
    }
    tokens = stx__batches_tokens(c, d);
    world = d->world ? d->world : 1;
    if (d->rank >= world || d->B % world) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_batches_create: expected B to be a multiple of world, and rank to be less "
                 "than world, got B = %zu, rank %zu of %zu",
                 d->B, d->rank, world);
        return NULL;
    }
    if (d->T >= tokens / d->B) {
        size_t T1 = d->T + 1;
        if (!T1 || d->B > SIZE_MAX / T1)
            stx_fail(x, STX_ERR_ARG,
                     "the data are too short: %zu tokens, but B (T + 1) tokens are needed, which "
                     "overflows with B = %zu and T = %zu; use a smaller batch size or block length",
                     tokens, d->B, d->T);
        else
            stx_fail(x, STX_ERR_ARG,
                     "the data are too short: %zu tokens, but %zu streams with blocks of %zu "
                     "tokens need at least %zu = B (T + 1); use more data, or a smaller batch size "
                     "or block length",
                     tokens, d->B, d->T, d->B * T1);
        return NULL;
    }
    if ((b = (stx_batches *)stx_block(x, sizeof *b)) == NULL) return NULL;
    b->x = x;
    b->c = c;
    b->T = d->T;
    b->how = d->how;
    b->first = d->first;
    b->n = tokens / d->B;
    if (d->how == STX_BATCH_RECORDS) {
        size_t blocks = tokens / (d->T + 1);
        b->n = blocks / d->B * (d->T + 1);
        b->records = blocks - (d->B - 1) * (blocks / d->B);
    }
    b->rows = d->B / world;
    b->row0 = d->rank * b->rows;
    b->seed = d->seed;
    b->s.fresh = 1;
    return b;
}

STX_DEF void stx_batches_free(stx_batches *b) {
    if (b) stx_block_free(b->x, b);
}

STX_DEF size_t stx_batches_rows(const stx_batches *b) {
    return b ? b->rows : 0;
}

STX_DEF size_t stx_batches_stream(const stx_batches *b) {
    if (!b) return 0;
    return b->records ? b->records * b->T : b->n;
}

STX_DEF size_t stx_batches_epoch(const stx_corpus *c, const stx_batches_desc *d) {
    size_t n, blocks, T;
    if (!c || !d || !d->B || !d->T || d->T == SIZE_MAX) return 0;
    T = d->T;
    n = stx__batches_tokens(c, d);
    blocks = n / (T + 1);
    if (d->how == STX_BATCH_RECORDS)
        return blocks < d->B ? 0 : blocks - (d->B - 1) * (blocks / d->B);
    n /= d->B;
    return n <= T ? 0 : (n - T + T - 1) / T; /* number of batches until p >= n - T */
}

/* Returns the number of tokens by which a stream is rotated in this epoch. The number
   depends only on the seed, the row and wraps. */
static size_t stx__batches_rotation(const stx_batches *b, size_t row, int eval) {
    uint32_t u[4];
    if (b->how != STX_BATCH_ROLL || eval) return 0;
    stx_philox(b->seed ^ STX__BATCH_STREAM, row + 1, b->s.wraps, u);
    return (size_t)(((uint64_t)u[1] << 32 | u[0]) % b->n);
}

/* Reads n tokens of a stream from position p, wrapping around at its end. */
static int stx__batches_ring(const stx_batches *b, size_t row, size_t p, size_t n, int32_t *out) {
    size_t k;
    for (; n; n -= k, out += k, p = 0) {
        k = b->n - p < n ? b->n - p : n;
        if (!stx_corpus_read(b->c, b->first + row * b->n + p, k, out)) return 0;
    }
    return 1;
}

static int stx__batches_read(const stx_batches *b, size_t p, size_t T, int eval, int32_t *x,
                             int32_t *y) {
    size_t r;
    if (b->records) p = p / b->T * (b->T + 1);
    for (r = 0; r < b->rows; r++) {
        size_t row = b->row0 + r, at = b->first + row * b->n + p,
               rotation = stx__batches_rotation(b, row, eval);
        if (rotation) {
            if (!stx__batches_ring(b, row, (rotation + p) % b->n, T, x + r * T)
                || !stx__batches_ring(b, row, (rotation + p + 1) % b->n, T, y + r * T))
                return 0;
        } else if (!stx_corpus_read(b->c, at, T, x + r * T)
                   || !stx_corpus_read(b->c, at + 1, T, y + r * T))
            return 0;
    }
    return 1;
}

/* Returns 1 if the training position p is past the last batch. */
static int stx__batches_end(const stx_batches *b, uint64_t p) {
    return b->records ? p >= b->records * b->T : p >= b->n - b->T;
}

STX_DEF int stx_batches_next(stx_batches *b, int32_t *x, int32_t *y) {
    int fresh;
    if (!b || !stx_ok(b->x)) return STX_BATCH_END;
    if (!x || !y) {
        stx_fail(b->x, STX_ERR_ARG, "stx_batches_next: %s: expected a buffer, got NULL",
                 x ? "y" : "x");
        return STX_BATCH_END;
    }
    if (!stx__batches_read(b, (size_t)b->s.p, b->T, 0, x, y)) return STX_BATCH_END;
    fresh = b->s.fresh;
    b->s.fresh = 0;
    b->s.p += b->T;
    if (stx__batches_end(b, b->s.p)) {
        uint32_t u[4];
        uint64_t most = b->T < b->n - b->T ? b->T : b->n - b->T;
        stx_philox(b->seed ^ STX__BATCH_STREAM, 0, ++b->s.wraps, u);
        b->s.p = b->how == STX_BATCH_STREAMS ? ((uint64_t)u[1] << 32 | u[0]) % most : 0;
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
    if (stx__batches_end(b, s.p) || s.fresh < 0 || s.fresh > 1 || (!s.fresh && s.p < b->T)
        || (b->how != STX_BATCH_STREAMS && (s.p % b->T || s.fresh != (s.p == 0)))) {
        stx_fail(b->x, STX_ERR_ARG,
                 "stx_batches_set: position %llu (%s) is impossible in streams of %zu tokens with "
                 "blocks of %zu; resume with the data, batch size and block length of the saved "
                 "run, or start at position 0",
                 (unsigned long long)s.p, s.fresh ? "fresh" : "continued", b->n, b->T);
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
    size_t p, T, end;
    if (T_this) *T_this = 0;
    if (!b || !stx_ok(b->x)) return STX_BATCH_END;
    if (!x || !y || !T_this) {
        stx_fail(b->x, STX_ERR_ARG, "stx_batches_next_eval: x, y and T_this must not be NULL");
        return STX_BATCH_END;
    }
    if (b->rule < STX_EVAL_ALL || b->rule > STX_EVAL_LITERAL) {
        stx_fail(b->x, STX_ERR_ARG,
                 "stx_batches_next_eval: rule: expected STX_EVAL_ALL or STX_EVAL_LITERAL, got %d: "
                 "call stx_batches_rewind with one of them",
                 b->rule);
        return STX_BATCH_END;
    }
    p = b->eval;
    end = b->rule == STX_EVAL_LITERAL ? b->n - b->T : b->n - 1;
    if (b->records) end = b->records * b->T;
    if (p >= end) return STX_BATCH_END;
    T = b->records || b->T < b->n - 1 - p ? b->T : b->n - 1 - p;
    if (!stx__batches_read(b, p, T, 1, x, y)) return STX_BATCH_END;
    *T_this = T;
    b->eval = p + T;
    return p ? STX_BATCH_OK : STX_BATCH_FRESH;
}

#endif /* SEQTX_TEXT_IMPLEMENTATION */

#define STX__LETTERS 2
#include "seqtx.h"      /* restores the single-letter macros */
