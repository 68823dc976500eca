/* spm_train.c - trains a SentencePiece model, and cuts text by one into numbers of pieces

       make SENTENCEPIECE=1 build/spm_train
       build/spm_train --text train.txt --model wiki --vocab 12000       # leaves wiki.model and wiki.vocab
       build/spm_train --model wiki --encode valid.txt > valid.ids       # for --tokens ids --pieces wiki.vocab

   The trainers take wiki.model itself in a build with SentencePiece (--tokens spm
   --pieces wiki.model). Numbers are those of PAR's reference: padding 0, begin 1, end
   2, unknown 3, then the symbols, then pieces by falling score. */
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
    TR_TEXT("text", TR_LOCAL, &opt.text, "train on this text, a sentence a line"),
    TR_SIZE("vocab", TR_LOCAL, &opt.vocab, 8, 1u << 24, "pieces"),
    TR_CHOICE("kind", TR_LOCAL, &opt.kind, "unigram|bpe", "how pieces are found"),
    TR_FLAG("lowercase", TR_LOCAL, &opt.lowercase,
            "NFKC and all letters small (nfkc_cf); without: NFKC alone"),
    TR_FLAG("split-digits", TR_LOCAL, &opt.split_digits, "every digit is a piece of its own"),
    TR_TEXT("symbols", TR_LOCAL, &opt.symbols, "pieces that are never cut, with commas between"),
    TR_REAL_OPEN("coverage", TR_LOCAL, &opt.coverage, TR_OPEN_MIN, 0, 1,
                 "share of the characters that become pieces; the rest is unknown"),
    TR_SIZE("threads", TR_LOCAL, &opt.threads, 1, 1024,
            "threads; the library adds up in an order that depends on them (its own default: "
            "16)"),
    TR_GROUP("Both"),
    TR_TEXT("model", TR_LOCAL, &opt.model,
            "MODEL.model and MODEL.vocab: made with --text, read with --encode"),
    TR_GROUP("Encoding"),
    TR_TEXT(
        "encode", TR_LOCAL, &opt.encode,
        "write the numbers of this text's pieces, a line for each of its lines, to standard output"),
    TR_FLAG("eos", TR_LOCAL, &opt.eos, "... with the end of the sentence at the end of each line"),
    TR_END};
static tr_options options = {"spm_train",
                             "Trains a SentencePiece model and cuts text by it.",
                             table,
                             NULL,
                             "vocab=12000 lowercase symbols=@-@ coverage=0.9995 threads=16",
                             NULL,
                             ""};

/* The library's other options stay as they are: PAR's reference sets no more than
   these. */
static int train(char err[TR_ERR]) {
    char vocab[32], coverage[32], threads[32], why[TR_ERR / 2];
    const char *const names[] = {"input",
                                 "model_prefix",
                                 "vocab_size",
                                 "model_type",
                                 "normalization_rule_name",
                                 "user_defined_symbols",
                                 "character_coverage",
                                 "num_threads",
                                 "pad_id",
                                 "bos_id",
                                 "eos_id",
                                 "unk_id",
                                 "pad_piece",
                                 "bos_piece",
                                 "eos_piece",
                                 "unk_piece",
                                 "minloglevel",
                                 "split_digits"};
    const char *const values[] = {opt.text,
                                  opt.model,
                                  vocab,
                                  opt.kind ? "bpe" : "unigram",
                                  opt.lowercase ? "nfkc_cf" : "nfkc",
                                  opt.symbols ? opt.symbols : "",
                                  coverage,
                                  threads,
                                  "0",
                                  "1",
                                  "2",
                                  "3",
                                  "[PAD]",
                                  "[BOS]",
                                  "[EOS]",
                                  "[UNK]",
                                  "1",
                                  "true"};
    const size_t n = sizeof names / sizeof *names - !opt.split_digits;
    snprintf(vocab, sizeof vocab, "%llu", (unsigned long long)opt.vocab);
    snprintf(threads, sizeof threads, "%llu", (unsigned long long)opt.threads);
    tr_number(coverage, opt.coverage);
    if (strchr(opt.text, ','))
        return tr_fail(err, TR_ERR,
                       "--text %.300s: a path with a comma means two files to the library",
                       opt.text);
    return stx_spm_train(names, values, n, why, sizeof why)
               ? 1
               : tr_fail(err, TR_ERR, "--text: %s", why);
}

static int encode(char err[TR_ERR]) {
    stx_ctx *x = stx_create(NULL);
    stx_vocab_desc d;
    stx_vocab *v;
    stx_map m;
    char *model = (char *)malloc(strlen(opt.model) + 7);
    int32_t *ids = NULL;
    size_t at, n, i, k, room = 0, count;
    if (!x || !model) {
        stx_destroy(x);
        free(model);
        return tr_fail(err, TR_ERR, "no memory");
    }
    sprintf(model, "%s.model", opt.model);
    memset(&d, 0, sizeof d);
    d.kind = STX_TOK_PIECES;
    d.pieces = model;
    d.join_lines = 1;
    v = stx_vocab_build(x, &d, NULL, 0, 0);
    memset(&m, 0, sizeof m);
    if (v && opt.eos && stx_vocab_eos(v) < 0)
        stx_fail(x, STX_ERR_ARG, "--eos: %s has no such piece", model);
    if (v && stx_map_open(x, &m, opt.encode))
        for (at = 0; at < m.size && stx_ok(x); at += n + 1) {
            for (n = 0; at + n < m.size && m.data[at + n] != '\n';) n++;
            count = stx_vocab_encode(v, (const char *)m.data + at, n, ids, room);
            if (count == STX_NPOS) break;
            if (count > room) {
                free(ids);
                ids = (int32_t *)malloc(2 * count * sizeof *ids);
                room = ids ? 2 * count : 0;
                if (!ids) {
                    stx_fail(x, STX_ERR_MEMORY, "no memory for a line");
                    break;
                }
                stx_vocab_encode(v, (const char *)m.data + at, n, ids, room);
            }
            for (i = 0, k = count + (size_t)opt.eos; i < k; i++)
                printf(i ? " %d" : "%d", (int)(i < count ? ids[i] : stx_vocab_eos(v)));
            printf("\n");
        }
    if (stx_ok(x) && (fflush(stdout) || ferror(stdout)))
        stx_fail(x, STX_ERR_IO, "the numbers cannot be written: %s", strerror(errno));
    if (!stx_ok(x)) tr_fail(err, TR_ERR, "--encode: %s", stx_error(x));
    n = (size_t)stx_ok(x);
    stx_map_close(&m);
    stx_vocab_free(v);
    stx_destroy(x);
    free(model);
    free(ids);
    return (int)n;
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
                     "no --model: give the beginning of the names of a .model and a .vocab");
    if (ok && !opt.text == !opt.encode)
        ok = tr_fail(err, TR_ERR,
                     "give --text, to train a model, or --encode, to cut a text by it");
    ok = ok && (opt.text ? train(err) : encode(err));
    if (!ok) fprintf(stderr, "%s: %s\n", options.program, err);
    tr_options_free(&options);
    return ok ? 0 : 2;
}
