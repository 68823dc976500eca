/* spm_train.c - trains a SentencePiece model, and encodes texts with it.

       make SENTENCEPIECE=1 build/spm_train
       build/spm_train --text train.txt --model wiki --vocab 12000
       build/spm_train --model wiki --encode valid.txt > valid.ids

   The first command writes wiki.model and wiki.vocab. The second writes ids, which the
   trainers read with --tokens ids --pieces wiki.vocab. Trainers that are built with
   SentencePiece can read wiki.model itself (--tokens spm --pieces wiki.model). The ids
   are the same as in PAR's reference code: 0 padding, 1 begin, 2 end, 3 unknown, then
   the symbols, then the pieces by decreasing score. */
#include "train.h"
#define SEQTX_IMPLEMENTATION
#include "../seqtx.h"
#include "../seqtx_text.h"

static struct {
    const char *text, *model, *symbols, *encode;
    uint64_t vocab, threads;
    int kind, lowercase, split_digits, eos;
    double coverage;
} opt;

static tr_opt table[] = {
    TR_GROUP("Training"),
    TR_TEXT("text", TR_LOCAL, &opt.text, "train on this text, one sentence per line"),
    TR_SIZE("vocab", TR_LOCAL, &opt.vocab, 8, 1u << 24, "number of pieces"),
    TR_CHOICE("kind", TR_LOCAL, &opt.kind, "unigram|bpe", "kind of model"),
    TR_FLAG("lowercase", TR_LOCAL, &opt.lowercase,
            "normalise the text by NFKC and convert it to lower case (nfkc_cf); otherwise NFKC "
            "only"),
    TR_FLAG("split-digits", TR_LOCAL, &opt.split_digits, "make each digit a separate piece"),
    TR_TEXT("symbols", TR_LOCAL, &opt.symbols, "pieces that are never split, comma-separated"),
    TR_REAL_OPEN("coverage", TR_LOCAL, &opt.coverage, TR_OPEN_MIN, 0, 1,
                 "fraction of the text's characters that pieces cover; others are unknown"),
    TR_SIZE("threads", TR_LOCAL, &opt.threads, 1, 1024,
            "number of threads, on which the result depends (SentencePiece's default: 16)"),
    TR_GROUP("Both"),
    TR_TEXT("model", TR_LOCAL, &opt.model,
            "name of the files MODEL.model and MODEL.vocab, which --text writes and --encode "
            "reads"),
    TR_GROUP("Encoding"),
    TR_TEXT("encode", TR_LOCAL, &opt.encode,
            "write the ids of this text to standard output, line by line"),
    TR_FLAG("eos", TR_LOCAL, &opt.eos, "end each line with the end-of-sentence id"),
    TR_END};

static tr_options options = {"spm_train",
                             "Trains a SentencePiece model, and encodes texts with it.",
                             table,
                             NULL,
                             "vocab=12000 lowercase symbols=@-@ coverage=0.9995 threads=16",
                             NULL,
                             "", NULL, NULL};

/* Trains with the options that PAR's reference sets, and SentencePiece's defaults for all
   others. Returns 0 and sets err on failure. */
static int train(char err[TR_ERR]) {
    enum { MAX = 18 };

    const char *names[MAX], *values[MAX];
    char vocab[32], coverage[32], threads[32], why[TR_ERR / 2];
    size_t n = 0;
    snprintf(vocab, sizeof vocab, "%llu", (unsigned long long)opt.vocab);
    snprintf(threads, sizeof threads, "%llu", (unsigned long long)opt.threads);
    tr_number(coverage, opt.coverage);
    if (strchr(opt.text, ','))
        return tr_fail(err, TR_ERR,
                       "--text: expected a path without a comma, got '%.300s', which SentencePiece "
                       "would read as a list of files",
                       opt.text);

#define SET(name, value) (names[n] = (name), values[n++] = (value))
    SET("input", opt.text);
    SET("model_prefix", opt.model);
    SET("vocab_size", vocab);
    SET("model_type", opt.kind ? "bpe" : "unigram");
    SET("normalization_rule_name", opt.lowercase ? "nfkc_cf" : "nfkc");
    SET("user_defined_symbols", opt.symbols ? opt.symbols : "");
    SET("character_coverage", coverage);
    SET("num_threads", threads);
    SET("pad_id", "0");
    SET("bos_id", "1");
    SET("eos_id", "2");
    SET("unk_id", "3");
    SET("pad_piece", "[PAD]");
    SET("bos_piece", "[BOS]");
    SET("eos_piece", "[EOS]");
    SET("unk_piece", "[UNK]");
    SET("minloglevel", "1");
    if (opt.split_digits) SET("split_digits", "true");
#undef SET
    if (stx_spm_train(names, values, n, why, sizeof why)) return 1;
    return tr_fail(err, TR_ERR, "--text: %s", why);
}

/* Prints the ids of one line (n bytes). *ids is a buffer of *capacity elements, which
   is enlarged when necessary. Errors are set in the context. */
static void encode_line(stx_ctx *x, const stx_vocab *v, int first, const char *line, size_t n,
                        int32_t **ids, size_t *capacity) {
    /* only the first line can begin with a byte-order mark */
    size_t (*const run)(const stx_vocab *, const char *, size_t, int32_t *, size_t) =
        first ? stx_vocab_encode : stx_vocab_encode_part;
    size_t i, count = run(v, line, n, *ids, *capacity);
    if (count == STX_NPOS) return;
    if (count > *capacity) {
        free(*ids);
        *capacity = 2 * count;
        *ids = (int32_t *)malloc(*capacity * sizeof **ids);
        if (!*ids) {
            stx_fail(x, STX_ERR_MEMORY, "out of memory: cannot encode a line of %zu bytes", n);
            return;
        }
        run(v, line, n, *ids, *capacity);
    }
    for (i = 0; i < count; i++) printf(i ? " %d" : "%d", (int)(*ids)[i]);
    if (opt.eos) printf(count ? " %d" : "%d", (int)stx_vocab_eos(v));
    printf("\n");
}

static int encode(char err[TR_ERR]) {
    stx_ctx *x = stx_create(NULL);
    stx_vocab_desc d;
    stx_vocab *v;
    stx_map m;
    char *model = (char *)malloc(strlen(opt.model) + 7);
    int32_t *ids = NULL;
    size_t at, n, capacity = 0;
    int ok;
    if (!x || !model) {
        stx_destroy(x);
        free(model);
        return tr_fail(err, TR_ERR, "--encode: out of memory: cannot create a context");
    }
    sprintf(model, "%s.model", opt.model);
    memset(&d, 0, sizeof d);
    d.kind = STX_TOK_PIECES;
    d.pieces = model;
    d.join_lines = 1;
    v = stx_vocab_build(x, &d, NULL, 0, 0);
    if (v && opt.eos && stx_vocab_eos(v) < 0)
        stx_fail(x, STX_ERR_ARG, "--eos: %s has no end-of-sentence piece", model);

    memset(&m, 0, sizeof m);
    if (v && stx_map_open(x, &m, opt.encode))
        for (at = 0; at < m.size && stx_ok(x); at += n + 1) {
            for (n = 0; at + n < m.size && m.data[at + n] != '\n';) n++;
            encode_line(x, v, !at, (const char *)m.data + at, n, &ids, &capacity);
        }
    if (stx_ok(x) && (fflush(stdout) || ferror(stdout)))
        stx_fail(x, STX_ERR_IO, "cannot write to standard output: %s", strerror(errno));
    if (!stx_ok(x)) tr_fail(err, TR_ERR, "--encode: %s", stx_error(x));
    ok = stx_ok(x);
    stx_map_close(&m);
    stx_vocab_free(v);
    stx_destroy(x);
    free(model);
    free(ids);
    return ok;
}

int main(int argc, char **argv) {
    char err[TR_ERR];
    int ok, got;
    tr_standard_streams();
    got = tr_parse(&options, argc, argv, err, TR_ERR);
    if (got == 2) return 0;
    ok = got == 1;
    if (ok && !opt.model)
        ok = tr_fail(err, TR_ERR,
                     "--model is missing: give the output prefix, to which .model and .vocab are "
                     "appended");
    if (ok && !opt.text == !opt.encode)
        ok = tr_fail(err, TR_ERR,
                     "expected either --text, to train a model, or --encode, to encode a text");
    ok = ok && (opt.text ? train(err) : encode(err));
    if (!ok) fprintf(stderr, "%s: %s\n", options.program, err);
    tr_options_free(&options);
    return ok ? 0 : 2;
}
