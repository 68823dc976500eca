/* fuzz_io.c - fuzzes the readers in seqtx.h and seqtx_text.h: safetensors, stored
   vocabularies, text with every kind of token.

   With libFuzzer:
       clang -fsanitize=fuzzer,address,undefined -DSEQTX_IMPLEMENTATION -DSTX_LIBFUZZER \
           tests/io/fuzz_io.c -o fuzz_io -lm
   Without libFuzzer, repeatable mutations of built-in seeds:
       cc -DSEQTX_IMPLEMENTATION tests/io/fuzz_io.c -o fuzz_io -lm
       ./fuzz_io [iterations [seed]]

   The first byte of an input selects the reader. If the library violates its
   specification, the program calls abort(). */
#include "../../seqtx.h"
#include "../../seqtx_text.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MUST(c) \
  do { \
    if (!(c)) { \
      fprintf(stderr, "fuzz_io.c:%d: %s (%s)\n", __LINE__, #c, stx_error(x)); \
      abort(); \
    } \
  } while (0)

enum { FILES, BLOBS, TEXTS, READERS };

static char path[512];
static long accepted[READERS]; /* number of inputs that each reader accepted */
static stx_ctx *shared;        /* reused for 20 inputs, because creating it is slow */

static void put(const unsigned char *s, size_t n) {
    FILE *f;
    if (!path[0]) {
        const char *tmp = getenv("TMPDIR");
        snprintf(path, sizeof path, "%.200s/seqtx_fuzz.%p.tmp", tmp && *tmp ? tmp : "/tmp",
                 (void *)path);
    }
    /* Remove the file first, because some file systems flush a file that is truncated
       and rewritten. */
    remove(path);
    f = fopen(path, "wb");
    if (!f || fwrite(s, 1, n, f) != n || fclose(f) != 0) {
        fprintf(stderr, "cannot write %s\n", path);
        exit(2);
    }
}

static void fuzz_file(stx_ctx *x, const unsigned char *s, size_t n) {
    stx_file *f;
    size_t i, k, total = 0;
    put(s, n);
    f = stx_file_open(x, path);
    MUST((f != NULL) == (stx_ok(x) != 0));
    for (i = 0; i < stx_file_count(f); i++) {
        const stx_entry *e = stx_file_entry(f, i);
        size_t count = 1;
        MUST(stx_file_find(f, e->name) == e);
        MUST((const unsigned char *)e->data + e->bytes >= (const unsigned char *)e->data);
        for (k = 0; k < (size_t)e->ndim; k++) count *= e->dim[k];
        MUST(e->dtype == STX_OTHER || count == e->count);
        MUST(e->dtype == STX_OTHER || e->bytes == count * stx_dtype_size(e->dtype));
        total += e->bytes;
        MUST(total <= n);
        if (e->dtype == STX_OTHER || e->dtype == STX_C64) {
            float g;
            MUST(e->kind && e->bytes / 16 <= e->count);
            MUST(!stx_entry_get_f32(e, &g, e->count) && *stx_error(x));
            stx_clear_error(x);
        } else {
            double *d = (double *)malloc((count + 1) * sizeof *d);
            float *g = (float *)malloc((count + 1) * sizeof *g);
            int64_t *v = (int64_t *)malloc((count + 1) * sizeof *v);
            const int real = e->kind[0] == 'F' || e->kind[1] == 'F';
            MUST(d && g && v);
            MUST(stx_entry_get_f64(e, d, count) && stx_entry_get_f32(e, g, count));
            if (e->dtype != STX_U64) MUST(stx_entry_get_i64(e, v, count) == !real);
            stx_entry_get_i64(e, v, count);
            stx_clear_error(x);
            free(d);
            free(g);
            free(v);
        }
    }
    stx_file_meta(f, "step");
    accepted[FILES] += f != NULL;
    stx_file_close(f);
}

static void fuzz_blob(stx_ctx *x, const unsigned char *s, size_t n) {
    stx_vocab *v = stx_vocab_load(x, s, n);
    unsigned char *again = (unsigned char *)malloc(n + 1);
    size_t i, len;
    MUST(again && (v != NULL) == (stx_ok(x) != 0));
    if (v) {
        MUST(stx_vocab_save(v, again, n) == n && !memcmp(again, s, n));
        for (i = 0; i < stx_vocab_size(v); i++) {
            const char *p = stx_vocab_piece(v, (int32_t)i, &len);
            int32_t id = -1;
            MUST(p && stx_vocab_find(v, p, len) == (int32_t)i);
            if ((int32_t)i != stx_vocab_eos(v) && (int32_t)i != stx_vocab_unk(v))
                MUST(stx_vocab_encode_part(v, p, len, &id, 1) == 1 && id == (int32_t)i);
        }
        accepted[BLOBS]++;
    }
    free(again);
    stx_vocab_free(v);
}

/* The tokens of a corpus must equal the tokens of its text. They must decode to the
   text, unless this kind of token loses information. mark: length of the byte-order
   mark. */
static void check_tokens(stx_ctx *x, const stx_vocab_desc *d, stx_vocab *v, const stx_corpus *c,
                         const char *s, size_t n, size_t mark) {
    size_t len = stx_vocab_encode(v, s, n, NULL, 0), i;
    int32_t *ids = (int32_t *)malloc((len + 1) * sizeof *ids);
    int32_t *got = (int32_t *)malloc((len + 1) * sizeof *got);
    MUST(len == stx_corpus_size(c) || (len + 1 == stx_corpus_size(c) && stx_vocab_eos(v) >= 0));
    MUST(ids && got && stx_vocab_encode(v, s, n, ids, len) == len
         && stx_corpus_read(c, 0, len, got));
    MUST(!memcmp(ids, got, len * sizeof *ids));
    for (i = 0; i < len; i++) MUST(ids[i] >= 0 && (size_t)ids[i] < stx_vocab_size(v));
    if (d->kind != STX_TOK_WORDS && d->min_count < 2 && (d->kind == STX_TOK_BYTES || !d->eos)) {
        char *text = (char *)malloc(n + 1);
        MUST(text && stx_vocab_decode(v, ids, len, text, n) == n - mark);
        MUST(!memcmp(text, s + mark, n - mark));
        free(text);
    }
    free(ids);
    free(got);
}

/* The parts of the file before and after byte `cut` must add up to the whole corpus c. */
static void check_cut(stx_ctx *x, const stx_vocab *v, const stx_corpus *c, uint64_t cut) {
    stx_corpus *a, *b;
    a = stx_corpus_open(x, v, path, 0, cut);
    if (!a) stx_clear_error(x);
    b = stx_corpus_open(x, v, path, cut, 0);
    if (!b) stx_clear_error(x);
    MUST(stx_corpus_bytes(a) + stx_corpus_bytes(b) == stx_corpus_bytes(c));
    if (v && stx_vocab_eos(v) < 0)
        MUST(stx_corpus_size(a) + stx_corpus_size(b) == stx_corpus_size(c));
    stx_corpus_close(a);
    stx_corpus_close(b);
}

/* Tests an input that consists of a settings byte, a byte that selects the cut, and a
   text. */
static void fuzz_text(stx_ctx *x, const unsigned char *s, size_t n) {
    stx_vocab_desc d;
    stx_vocab *v;
    stx_corpus *c;
    size_t cut, mark;
    if (n < 2) return;
    memset(&d, 0, sizeof d);
    d.kind = s[0] % 3;
    d.order = s[0] / 3 % 3;
    d.compact = s[0] / 9 % 2;
    d.eos = s[0] / 18 % 2;
    d.eos_first = s[0] / 36 % 2;
    d.min_count = s[0] / 72;
    cut = s[1];
    s += 2;
    n -= 2;
    mark = d.kind != STX_TOK_BYTES && n >= 3 && !memcmp(s, "\xEF\xBB\xBF", 3) ? 3 : 0;
    put(s, n);
    v = stx_vocab_build(x, &d, path, 0, 0);
    MUST((v != NULL) == (stx_ok(x) != 0));
    c = stx_corpus_open(x, v, path, 0, 0);
    if (c) {
        MUST(stx_corpus_bytes(c) == n - mark);
        check_tokens(x, &d, v, c, (const char *)s, n, mark);
        cut %= n + 1;
        if (cut) check_cut(x, v, c, cut);
        accepted[TEXTS]++;
    }
    stx_corpus_close(c);
    stx_vocab_free(v);
}

#ifdef __cplusplus
extern "C" {
#endif
int LLVMFuzzerTestOneInput(const uint8_t *s, size_t n);
#ifdef __cplusplus
}
#endif

int LLVMFuzzerTestOneInput(const uint8_t *s, size_t n) {
    static int uses;
    stx_ctx *x = shared;
    if (!n) return 0;
    if (!x) x = shared = stx_create(NULL);
    if (!x) return 0;
    stx_clear_error(x);
    if (s[0] % READERS == FILES)
        fuzz_file(x, s + 1, n - 1);
    else if (s[0] % READERS == BLOBS)
        fuzz_blob(x, s + 1, n - 1);
    else
        fuzz_text(x, s + 1, n - 1);
    if (++uses % 20 == 0) {
        stx_destroy(x);
        shared = NULL;
    }
    return 0;
}

#ifndef STX_LIBFUZZER
static uint64_t state;

static uint32_t rnd(uint32_t n) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 33) % n;
}

  #define HEADER_1 \
    "{\"__metadata__\":{\"step\":\"1\\u00e4\\ud83d\\ude00\"}," \
    "\"w\":{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[0,8]}," \
    "\"b\":{\"dtype\":\"BF16\",\"shape\":[1],\"data_offsets\":[8,10]}," \
    "\"n\":{\"dtype\":\"U8\",\"shape\":[0,3],\"data_offsets\":[10,10]}}"
  #define HEADER_2 "{\"i\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[0,8]}} "
  #define HEADER_3 \
    "{\"h\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":[0,4]}," \
    "\"b\":{\"dtype\":\"BOOL\",\"shape\":[2],\"data_offsets\":[4,6]}," \
    "\"d7\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1],\"data_offsets\":[6,10]}," \
    "\"n\":{\"dtype\":\"F4\",\"shape\":[4],\"data_offsets\":[10,12]}}"
  #define HEADER_4 \
    "{\"u\":{\"dtype\":\"U64\",\"shape\":[1],\"data_offsets\":[0,8]}," \
    "\"c\":{\"dtype\":\"C64\",\"shape\":[],\"data_offsets\":[8,16]}," \
    "\"i\":{\"dtype\":\"I16\",\"shape\":[1,1,1,1,1,1,1,2],\"data_offsets\":[16,20]}," \
    "\"e\":{\"dtype\":\"F8_E4M3\",\"shape\":[2],\"data_offsets\":[20,22]}," \
    "\"d9\":{\"dtype\":\"F8_E5M2\",\"shape\":[1,1,1,1,1,1,1,1,2],\"data_offsets\":[22,24]}}"
  #define SEED(t) \
    { t, sizeof(t) - 1 }

/* Seeds for the fuzzer. The first FILE_SEEDS are safetensors files, for which main fills
   in the header lengths. */
static const struct {
    const char *s;
    size_t n;
} seeds[] = {
    SEED("\0\0\0\0\0\0\0\0\0" HEADER_1 "0123456789"),
    SEED("\0\0\0\0\0\0\0\0\0" HEADER_2 "01234567"),
    SEED("\0\2\0\0\0\0\0\0\0{}"),
    SEED("\0\0\0\0\0\0\0\0\0" HEADER_3 "0123456789AB"),
    SEED("\0\0\0\0\0\0\0\0\0" HEADER_4 "0123456\x80ghijklmnopqrstuv"),
    SEED("\1STXV\1\2\2\0\3\0\0\0\0\0\0\0\1\0\0\0a\5\0\0\0<eos>\3\0\0\0b\xC3\xA4"),
    SEED("\1STXV\1\0\3\0\3\0\0\0\0\0\0\0\1\0\0\0a\5\0\0\0<eos>\1\0\0\0\xFF"),
    SEED("\1STXV\1\1\0\0\3\0\0\0\0\0\0\0\1\0\0\0a\2\0\0\0\xC3\xA4\5\0\0\0<unk>"),
    SEED("\2\2\5the cat sat\r\non the\xC2\xA0mat \xE2\x80\xA8 <unk>\n\n"),
    SEED("\2\1\4b\xC3\xA4 \xF0\x9F\x98\x80\r\n\xE2\x82\xAC"),
    SEED("\2\x0A\3"
         "abc\nab"),
    SEED("\2\x95\7w w v u\nw v"),
    SEED("\2\x5C\1 \t\r\r\n\n x")};

enum { FILE_SEEDS = 5, SEEDS = sizeof seeds / sizeof *seeds };

/* Fragments that random byte changes would rarely produce. */
static const char *const fragments[] = {
    "{", "}", "[", "]", ",", ":", "\"", "\\u0000", "\\ud800", "\\n",
    "\"dtype\"", "\"F64\"", "\"F16\"", "\"BOOL\"", "\"F4\"", "\"U64\"", "\"F8_E5M2\"",
    "\"shape\":[1,1,1,1,1,1,1,1]", "\"shape\":[0]", "\"data_offsets\":[0,0]", "1,1,1,1,1,1,1,",
    "18446744073709551615", "4294967296", "-1", "1.0", "\"__metadata__\":{}",
    "\xEF\xBB\xBF", "\xED\xA0\x80", "\r\n", "<eos>", "<unk>", "\xC2\x85", "\xE3\x80\x80",
    "null"};

/* Sets the length field of a header, so that mutations reach the parser. */
static void fix_length(unsigned char *b, size_t n, size_t data) {
    size_t k, len = n - 9 > data ? n - 9 - data : 0;
    for (k = 0; k < 8; k++) b[1 + k] = (unsigned char)((uint64_t)len >> (8 * k) & 0xFF);
}

/* Returns the number of bytes of tensor data in a seed. */
static size_t data_of(size_t which) {
    static const size_t data[FILE_SEEDS] = {10, 8, 0, 12, 24};
    return which < FILE_SEEDS ? data[which] : 0;
}

/* Randomly changes an input b of n bytes, in a buffer of `size` bytes, and returns its
   new length. */
static size_t mutate(unsigned char *b, size_t n, size_t size) {
    size_t at = 1 + rnd((uint32_t)n - 1), k;
    const char *fragment;
    switch (rnd(6)) {
    case 0: /* flip a bit */
        b[at] ^= (unsigned char)(1 << rnd(8));
        return n;
    case 1: /* replace a byte */
        b[at] = (unsigned char)rnd(256);
        return n;
    case 2: /* truncate */
        return n > 2 ? at + 1 : n;
    case 3: /* delete some bytes */
        k = 1 + rnd(8);
        if (at + k >= n) return n;
        memmove(b + at, b + at + k, n - at - k);
        return n - k;
    case 4: /* insert a fragment */
        fragment = fragments[rnd(sizeof fragments / sizeof *fragments)];
        k = strlen(fragment);
        if (n + k >= size) return n;
        memmove(b + at + k, b + at, n - at);
        memcpy(b + at, fragment, k);
        return n + k;
    default: /* repeat some bytes */
        k = 1 + rnd(12);
        if (at + k >= n || n + k >= size) return n;
        memmove(b + at + k, b + at, n - at);
        return n + k;
    }
}

int main(int argc, char **argv) {
    static unsigned char b[1024];
    long i, count = argc > 1 ? atol(argv[1]) : 20000;
    state = 0x9E3779B97F4A7C15u + (argc > 2 ? (uint64_t)atol(argv[2]) : 0);
    for (i = 0; i < count; i++) {   /* first all seeds, unchanged */
        size_t which = i < SEEDS ? (size_t)i : rnd(SEEDS), n = seeds[which].n;
        int changes = i < SEEDS ? 0 : 1 + (int)rnd(4);
        memcpy(b, seeds[which].s, n);
        if (b[0] == FILES) fix_length(b, n, data_of(which));
        for (; changes; changes--) n = mutate(b, n, sizeof b);
        if (b[0] == FILES && n > 9 && rnd(8)) fix_length(b, n, data_of(which));
        LLVMFuzzerTestOneInput(b, n);
        if (i + 1 == SEEDS
            && (accepted[FILES] != FILE_SEEDS || accepted[BLOBS] != 3 || accepted[TEXTS] != 5)) {
            printf("a seed was refused: %ld of %d, %ld of 3 and %ld of 5 accepted\n"
                   "0 passed, 1 failed\n",
                   accepted[FILES], FILE_SEEDS, accepted[BLOBS], accepted[TEXTS]);
            return 1;
        }
    }
    stx_destroy(shared);
    shared = NULL;
    remove(path);
    printf("accepted: %ld safetensors, %ld vocabularies, %ld texts\n", accepted[FILES],
           accepted[BLOBS], accepted[TEXTS]);
    printf("%ld passed, %d failed\n", count, count < 1);
    return count < 1;
}
#endif
