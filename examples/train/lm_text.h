#pragma once
#include "base.h"
#include "buffer.h"
#include "options.h"
#include "options_values.h"
#include "files.h"
#include "signals.h"
#include "lm.h"
#include "lm_errors.h"
#include "lm_context.h"


// >>lm: text

/* Returns the fingerprint of a text: a hash of up to 256 evenly spaced pieces. It
   distinguishes texts of the same length. */
TR_DEF uint64_t tr_lm_fingerprint(const stx_corpus *c) {
    size_t n = stx_corpus_size(c), step = n / 256 > 256 ? n / 256 : 256, at, i;
    uint64_t h = TR_HASH_BEGIN;
    int32_t piece[256];
    for (at = 0; at < n; at += step) {
        size_t m = n - at < 256 ? n - at : 256;
        if (!stx_corpus_read(c, at, m, piece)) return 0;
        for (i = 0; i < m; i++) h = (h ^ (uint32_t)piece[i]) * 1099511628211u;
    }
    return h;
}

/* Refuses text in UTF-16 or UTF-32 unless --tokens was given. Such text contains many
   zero bytes and was probably not meant to be read as bytes. */
TR_DEF int tr_lm_check_encoding(tr_lm *t, const char *path) {
    const tr_lm_opt *o = t->opt;
    char first[4096];
    const char *wide;
    if (o->tokens > TR_COMPACT || tr_given(t->options, "tokens")) return 1;
    if (t->vocab && !o->init_from) return 1;        /* the run began with this text */
    wide = stx_text_encoding(first, tr_first_bytes(path, first, sizeof first));
    if (!wide) return 1;
    return tr_fail(t->err, TR_ERR, "--data %.1000s: expected UTF-8, got %s: convert it with "
                   "iconv -f %s -t UTF-8 OLD > NEW, or read its bytes unchanged with --tokens %s",
                   path, wide, wide, o->tokens == TR_BYTES ? "bytes" : "bytes-compact");
}

/* Removes a byte-order mark from the start of a text, as the corpus reader does, unless
   the tokens are bytes. Returns the new length. */
TR_DEF size_t tr_lm_unmark(const tr_lm *t, char *text, size_t len) {
    if (stx_vocab_kind(t->vocab) == STX_TOK_BYTES) return len;
    if (len < 3 || memcmp(text, "\xEF\xBB\xBF", 3) != 0) return len;
    memmove(text, text + 3, len - 3);
    return len - 3;
}

/* Location of the training, validation and test texts: three files, or three byte
   ranges in one file. */
typedef struct tr_lm_source {
    char     path[3][4096];
    uint64_t begin[3], end[3];
    int      dir;               /* 1: --data is a directory */
} tr_lm_source;

/* Reports that the file of --checkpoint, or of --out, does not exist. Returns 0. */
TR_DEF int tr_lm_no_checkpoint(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    const int of_out = o->out && !strncmp(o->checkpoint, o->out, strlen(o->out));
    return tr_fail(t->err, TR_ERR, "no such checkpoint: %.900s; check the name after --%s, or %s",
                   o->checkpoint, of_out ? "out" : "checkpoint",
                   t->training ? "give --data to start a new run" : "train a model first");
}

/* Reports that --data is missing. Returns 0. */
TR_DEF int tr_lm_no_data(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    struct stat st;
    if (t->training && o->checkpoint && !o->init_from && stat(o->checkpoint, &st)
        && errno == ENOENT)
        return tr_lm_no_checkpoint(t);
    return tr_fail(t->err, TR_ERR, "--data is missing: give a text file, or a directory with "
                   "train.txt, valid.txt and test.txt");
}

/* Locates the texts of --data. The last twentieth of a single file is the test text, and
   the twentieth before it is the validation text. */
TR_DEF int tr_lm_find_texts(tr_lm *t, tr_lm_source *from) {
    static const char *const names[3] = {"train.txt", "valid.txt", "test.txt"};
    const char *data = t->opt->data;
    struct stat st;
    uint64_t size;
    int part;
    memset(from, 0, sizeof *from);
    if (!data) return tr_lm_no_data(t);
    if (stat(data, &st)) {
        if (tr_find_option(t->options, "data", 4)->from == TR_FROM_CHECKPOINT)
            return tr_fail(t->err, TR_ERR, "the text of the checkpoint, %s: %s; if it was moved, "
                           "give its new path as --data", data, strerror(errno));
        return tr_fail(t->err, TR_ERR, "--data %s: %s", data, strerror(errno));
    }

    from->dir = S_ISDIR(st.st_mode);
    for (part = 0; part < 3; part++) {
        char *path = from->path[part];
        size_t most = sizeof from->path[part];
        int n = from->dir ? snprintf(path, most, "%s/%s", data, names[part])
                          : snprintf(path, most, "%s", data);
        if (n < 0 || (size_t)n >= most)
            return tr_fail(t->err, TR_ERR,
                           "--data: expected a path of fewer than %zu bytes, got %zu", most,
                           strlen(data));
    }
    if (from->dir) {
        for (part = 0; part < 3 && stat(from->path[part], &st); part++) {}
        if (part == 3)
            return tr_fail(t->err, TR_ERR, "--data %s: the directory has no train.txt, valid.txt "
                           "and test.txt; give a text file, or a directory with these three", data);
        return 1;
    }

    size = (uint64_t)st.st_size;
    if (!S_ISREG(st.st_mode))
        return tr_fail(t->err, TR_ERR, "--data %s: expected a regular file or a directory, got a "
                       "pipe or a device", data);
    if (size < 64)
        return tr_fail(t->err, TR_ERR, "--data %s: expected at least 64 bytes, got %llu", data,
                       (unsigned long long)size);
    from->end[0] = from->begin[1] = size - size / 20 * 2;
    from->end[1] = from->begin[2] = size - size / 20;
    from->end[2] = size;
    return 1;
}

/* Builds the vocabulary of the training text or, with --grow-vocab, extends t->base. */
TR_DEF int tr_lm_build_vocab(tr_lm *t, const tr_lm_source *from) {
    const tr_lm_opt *o = t->opt;
    stx_vocab_desc d;
    if (t->base) {
        t->vocab = stx_vocab_grow(t->base, from->path[0], from->begin[0], from->end[0],
                                  o->min_count);
        if (!t->vocab) return tr_lm_why(t);
        t->grown = stx_vocab_size(t->vocab) - stx_vocab_size(t->base);
        return 1;
    }
    memset(&d, 0, sizeof d);
    d.kind = o->tokens >= TR_CHARS ? STX_TOK_CHARS + (o->tokens - TR_CHARS) : STX_TOK_BYTES;
    d.pieces = o->pieces;
    d.join_lines = o->join_lines;
    d.compact = o->tokens == TR_COMPACT;
    d.eos = o->tokens == TR_CHARS;
    d.min_count = o->min_count;
    d.order = *t->kind->adapt_io ? t->kind->order : STX_ORDER_FIRST;
    d.eos_first = *t->kind->adapt_io && o->tokens == TR_WORDS && t->kind->eos_first;
    t->vocab = stx_vocab_build(t->x, &d, from->path[0], from->begin[0], from->end[0]);
    return t->vocab ? 1 : tr_lm_why(t);
}

/* Opens the texts. Validation and test texts of a directory are optional. On error,
   sets t->err and returns 0, and *failed receives the index of the text that could not
   be opened. */
TR_DEF int tr_lm_open_texts(tr_lm *t, const tr_lm_source *from, int *failed) {
    struct stat st;
    int part;
    for (part = 0; part < 3; part++) {
        *failed = part;
        if (from->dir && part && stat(from->path[part], &st) && errno == ENOENT) continue;
        t->text[part] = stx_corpus_open(t->x, t->vocab, from->path[part], from->begin[part],
                                        from->end[part]);
        if (!t->text[part]) return tr_lm_why(t);
    }
    return 1;
}

/* Rebuilds the vocabulary with the <unk> that a validation or test text requires. */
TR_DEF int tr_lm_add_unk(tr_lm *t, const tr_lm_source *from) {
    tr_opt *min_count = tr_find_option(t->options, "min-count", strlen("min-count"));
    int part;
    stx_clear_error(t->x);
    for (part = 0; part < 3; part++) {
        stx_corpus_close(t->text[part]);
        t->text[part] = NULL;
    }
    stx_vocab_free(t->vocab);
    t->vocab = NULL;
    t->unk_added = 1;
    return tr_set(min_count, "2", TR_FROM_TEXT, t->err, TR_ERR) && tr_lm_build_vocab(t, from)
           && tr_lm_open_texts(t, from, &part);
}

/* Stores the paths of memory-mapped texts, and watches the files for truncation. */
TR_DEF int tr_lm_watch_texts(tr_lm *t, const tr_lm_source *from) {
    int part;
    if (stx_vocab_kind(t->vocab) != STX_TOK_BYTES) return 1;
    for (part = 0; part < 3; part++) {
        if (!t->text[part]) continue;
        t->file[part] = strdup(from->path[part]);
        if (!t->file[part])
            return tr_fail(t->err, TR_ERR, "out of memory: cannot store the path of a text");
        if (!tr_watch(t->options->program, t->file[part], t->err, TR_ERR)) return 0;
    }
    return 1;
}

/* If t->err says that a word or character of the texts is not in the vocabulary of
   --init-from, says that --grow-vocab would append it. Returns 0. */
TR_DEF int tr_lm_suggest_grow(tr_lm *t) {
    char *advice = strstr(t->err, "; build the vocabulary");
    if (t->opt->init_from && !t->base && advice)
        snprintf(advice, TR_ERR - (size_t)(advice - t->err),
                 ": --grow-vocab appends it and all others that the training text has");
    return 0;
}

/* Opens the three texts, and builds the vocabulary unless a checkpoint provided it. With
   --grow-vocab, extends that of the checkpoint. If the validation or test text has words
   or characters that the vocabulary lacks, an <unk> is added to it. */
TR_DEF int tr_lm_data(tr_lm *t) {
    static const char *const names[3] = {"training", "validation", "test"};
    const tr_lm_opt *o = t->opt;
    tr_lm_source from;
    int part, new_vocab, may_add_unk, undecided = !tr_lm_decided(t, "min-count");
    if (!tr_lm_find_texts(t, &from)) return 0;
    for (part = 0; part < (from.dir ? 3 : 1); part++)
        if (!tr_lm_check_encoding(t, from.path[part])) return 0;

    if (o->grow_vocab) {
        t->base = t->vocab;
        t->vocab = NULL;
        undecided = !o->min_count;
    }
    new_vocab = !t->vocab;
    if (new_vocab && !tr_lm_build_vocab(t, &from)) return 0;
    if (!tr_lm_open_texts(t, &from, &part)) {
        may_add_unk = part && new_vocab && (o->tokens == TR_CHARS || o->tokens == TR_WORDS)
                      && undecided;
        if (!may_add_unk) return tr_lm_suggest_grow(t);
        if (!tr_lm_add_unk(t, &from)) return 0;
    }

    for (part = 0; part < 3; part++)
        if (t->text[part] && stx_corpus_size(t->text[part]) < 2)
            return tr_fail(t->err, TR_ERR, "--data %s: the %s text is too short: expected at least "
                           "2 tokens, got %zu", o->data, names[part],
                           stx_corpus_size(t->text[part]));
    t->fingerprint = tr_lm_fingerprint(t->text[0]);
    return tr_lm_watch_texts(t, &from);
}

/* Returns 0 and sets an error if a text has been truncated since it was opened. The
   result of the step or evaluation that has just read it is then invalid. */
TR_DEF int tr_lm_texts_are_whole(const tr_lm *t) {
    const char *path = tr_cut_short();
    if (path)
        stx_fail(t->x, STX_ERR_IO, "the text %s was truncated while it was being read; the last "
                 "checkpoint is intact", path);
    return !path;
}

/* Cuts the training text into B streams, which are read in blocks of T tokens. If
   memory runs out, the context's error is set, but not t->err. */
TR_DEF int tr_lm_batches(tr_lm *t, uint64_t B, uint64_t T) {
    stx_batches_desc d;
    memset(&d, 0, sizeof d);
    d.B = B;
    d.T = T;
    d.seed = t->opt->seed;
    d.how = t->opt->reading;
    d.count = t->use;
    t->batches = stx_batches_create(t->x, t->text[0], &d);
    if (t->batches || stx_error_code(t->x) == STX_ERR_MEMORY) return 1;
    return tr_fail(t->err, TR_ERR, "--data %s, --%s %llu, --block-sz %llu: %s", t->opt->data,
                   t->opt->streams ? "streams" : "batch-sz", (unsigned long long)B,
                   (unsigned long long)T, stx_error(t->x));
}
