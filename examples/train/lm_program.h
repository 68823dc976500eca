#pragma once
#include "base.h"
#include "buffer.h"
#include "options.h"
#include "options_values.h"
#include "options_set.h"
#include "options_help.h"
#include "options_parse.h"
#include "files.h"
#include "formats.h"
#include "terminal.h"
#include "signals.h"
#include "lm.h"
#include "lm_errors.h"
#include "lm_results.h"
#include "lm_context.h"
#include "lm_model.h"
#include "lm_text.h"
#include "lm_minutes.h"
#include "lm_sizes.h"
#include "lm_checkpoint.h"
#include "lm_start.h"
#include "lm_progress.h"
#include "lm_evaluate.h"
#include "lm_recompute.h"
#include "lm_steps.h"
#include "lm_generate.h"
#include "lm_chat.h"
#include "lm_score.h"


// >>lm: program

/* Returns the number of parameters of the model that the options describe. On error, sets
   t->err and returns 0. */
TR_DEF size_t tr_lm_count(tr_lm *t, size_t vocab) {
    size_t n = t->kind->count(t, vocab);
    if (n != SIZE_MAX) return n;
    tr_fail(t->err, TR_ERR, "the model has more parameters than can be counted: use a smaller "
            "--hid-sz, --nlayers or vocabulary");
    return 0;
}

/* Flushes standard output. On error, sets t->err and returns 0. */
TR_DEF int tr_lm_flush(tr_lm *t) {
    if (fflush(stdout) == 0) return 1;
    return tr_fail(t->err, TR_ERR, "cannot write to standard output: %s", strerror(errno));
}

TR_DEF int tr_lm_list_presets(tr_lm *t) {
    const tr_preset *p;
    printf("preset\tlayers\td\tvocabulary\tparameters\n");
    for (p = t->options->preset; p->name; p++) {
        size_t vocab, n;
        if (!tr_reset(t->options, t->err, TR_ERR)) return 0;
        if (!tr_apply_preset(t->options, p, t->err, TR_ERR) || !tr_lm_context(t)) return 0;
        vocab = t->opt->vocab ? (size_t)t->opt->vocab : 256;
        n = tr_lm_count(t, vocab);
        if (!n) return 0;
        printf("%s\t%llu\t%llu\t%zu\t%zu\n", p->name,
               (unsigned long long)tr_lm_number(t, "nlayers", 0),
               (unsigned long long)tr_lm_number(t, "hid-sz", 0), vocab, n);
    }
    return tr_lm_flush(t);
}

/* Checks that the vocabulary can grow if --grow-vocab is given. */
TR_DEF int tr_lm_check_grow(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    const char *why = "they come from a SentencePiece model";
    if (!o->grow_vocab) return 1;
    if (!o->init_from)
        return tr_fail(t->err, TR_ERR, "--grow-vocab requires --init-from, whose vocabulary it "
                       "extends%s",
                       t->training && t->vocab ? ": leave it out to resume the run" : "");
    if (o->vocab)
        return tr_fail(t->err, TR_ERR, "--grow-vocab and --vocab cannot be combined: --data "
                       "determines the size of the vocabulary");
    if (o->tokens >= TR_COMPACT && o->tokens <= TR_WORDS) return 1;
    if (o->tokens == TR_BYTES) why = "all 256 of them are in the vocabulary already";
    return tr_fail(t->err, TR_ERR, "--grow-vocab extends a vocabulary of words or characters, but "
                   "the tokens of %.600s are %s: %s; leave it out", o->init_from,
                   o->tokens == TR_BYTES ? "bytes" : "pieces", why);
}

/* --dry-run: prints sizes without creating the model. */
TR_DEF int tr_lm_dry_run(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    stx_file *f = NULL;
    size_t vocab = o->vocab ? (size_t)o->vocab : 256, n;
    uint64_t streams;
    double states = 0;
    char count[TR_TEXT_MAX], training[TR_TEXT_MAX], memory[TR_TEXT_MAX], line[1000];
    int ok, resumes;
    if (!tr_lm_context(t)) return 0;
    ok = tr_lm_open_checkpoint(t, &f);
    resumes = f != NULL;
    stx_file_close(f);
    if (!ok || !tr_lm_check_grow(t) || !t->kind->check(t)) return 0;
    if (o->grow_vocab && !tr_lm_data(t)) return 0;
    if (tr_given(t->options, "data") && !resumes && (!tr_lm_data(t) || !tr_lm_size(t))) return 0;

    if (t->vocab) vocab = stx_vocab_size(t->vocab);
    n = tr_lm_count(t, vocab);
    if (!n) return 0;
    t->kind->shape(t, line, sizeof line, &states);
    tr_count(count, (double)n);
    tr_bytes(training, 4.0 * (double)n * sizeof(stx_real));
    tr_bytes(memory, states * sizeof(stx_real));
    streams = tr_lm_streams(t);
    printf("%zu parameters (%s), vocabulary %zu\n%s\n", n, count, vocab, line);
    printf("%s%s for parameters, gradients and the optimiser\n"
           "%s for states and memories of %llu stream%s, in float; plus activations\n",
           tr_lm_decided(t, "freeze") ? "up to " : "", training, memory,
           (unsigned long long)streams, tr_s(streams));
    return tr_lm_flush(t);
}

/* Nonzero if two paths refer to the same file, or will do so once it is created. */
TR_DEF int tr_same_file(const char *a, const char *b) {
    const char *const path[2] = {a, b}, *name[2];
    char dir[2][4096];
    struct stat s, t;
    int i;
    if (!a || !b || !*a || !*b) return 0;
    if (!strcmp(a, b)) return 1;
    if (!stat(a, &s) && !stat(b, &t))
        return S_ISREG(s.st_mode) && s.st_dev == t.st_dev && s.st_ino == t.st_ino;

    /* at least one of them does not exist: compare names and directories */
    for (i = 0; i < 2; i++) {
        const char *slash = strrchr(path[i], '/');
        name[i] = slash ? slash + 1 : path[i];
        if ((size_t)(name[i] - path[i]) >= sizeof dir[i]) return 0;
        snprintf(dir[i], sizeof dir[i], "%.*s.", (int)(name[i] - path[i]), path[i]);
    }
    return !strcmp(name[0], name[1]) && !stat(dir[0], &s) && !stat(dir[1], &t)
           && s.st_dev == t.st_dev && s.st_ino == t.st_ino;
}

/* Nonzero if `file` is the lock file of `path`, or will be once it is created. */
TR_DEF int tr_is_lock_of(const char *file, const char *path) {
    char *lock = file && path && *path ? tr_claim_path(path) : NULL;
    const int same = tr_same_file(file, lock);
    free(lock);
    return same;
}

/* Checks that `path`, the output file of the option `name`, differs from the run's
   other files. If not, sets t->err and returns 0. */
TR_DEF int tr_lm_own_file(tr_lm *t, const char *name, const char *path) {
    static const char *const other[] = {
        "data", "checkpoint", "best", "log", "pieces", "inherit", "init-from", "score", "export"
    };
    static const char *const part[3] = {"train.txt", "valid.txt", "test.txt"};
    char text[4096];
    size_t i;
    int k;
    for (i = 0; path && t->opt->data && i < 3; i++) {
        int n = snprintf(text, sizeof text, "%s/%s", t->opt->data, part[i]);
        if (n < (int)sizeof text && tr_same_file(path, text))
            return tr_fail(t->err, TR_ERR, "--%s and the text %s are the same file", name, text);
    }
    for (i = 0; i < sizeof other / sizeof *other; i++) {
        const tr_opt *p = tr_find_option(t->options, other[i], strlen(other[i]));
        if (p && strcmp(other[i], name) && tr_same_file(path, *(const char *const *)p->to))
            return tr_fail(t->err, TR_ERR, "--%s and --%s are the same file", name, other[i]);
    }
    for (k = 0; k < 3; k++) {
        const char *output, *locked = tr_lm_output(t, k, &output);
        if (tr_is_lock_of(path, output))
            return tr_fail(t->err, TR_ERR,
                           "--%s %.500s is the lock file of --%s: name another file", name, path,
                           locked);
    }
    return 1;
}

/* Refuses options that would have no effect. */
TR_DEF int tr_lm_check_useful(tr_lm *t) {
    static const char *const for_text = "--generate and --interactive";
    static const char *const for_samples = "--generate, --interactive and --sample-every";
    static const char *const for_log = "training and evaluation, not to --interactive and --score";
    const tr_lm_opt *o = t->opt;
    const int writes = o->generate || o->interactive, samples = writes || o->sample_every > 0;
    const int logs = !o->interactive && !o->score;
    const tr_only only[] = {
        {"prompt", writes, for_text},
        {"stop", writes, for_text},
        {"temperature", samples, for_samples},
        {"top-k", samples, for_samples},
        {"top-p", samples, for_samples},
        {"repetition-penalty", samples, for_samples},
        {"repetition-window", o->repetition_penalty > 1, "--repetition-penalty above 1"},
        {"weights", !t->training,
            "generation and evaluation (--no-train, --interactive, --eval-only, --score)"},
        {"log", logs, for_log},
        {"tensorboard", logs, for_log},
        {"data", !o->score, "training and evaluation, not to --score, which names its text"},
        {"score-by", o->score != NULL, "--score"},
        {"eval-batch-sz", !o->score, "training and evaluation, not to --score"},
        {"eval-blocks", !o->score, "training and evaluation, not to --score"},
        {"no-train", !o->score, "--generate, not to --score, which never trains"},
        {"export", logs, "training, --no-train and --eval-only"},
        {"keep-best", t->training, "training"},
        {"best", t->training, "training"},
        {"sample-prime", o->sample_every, "--sample-every"},
        {"sample-length", o->sample_every, "--sample-every"},
        {"save-every", o->checkpoint != NULL, "runs with --checkpoint"},
        {"pieces", o->tokens == TR_SPM || o->tokens == TR_IDS, "--tokens spm and ids"},
        {"join-lines", o->tokens == TR_SPM, "--tokens spm"},
        {"gpu", o->device, "--device cuda"},
        {"shard", t->start.ranks > 1, "runs with several ranks"},
        {"tf32", o->device, "--device cuda"},
        {"tune", o->device, "--device cuda"},
        {"no-graph", o->device, "--device cuda"}
    };
    if (t->training && o->recompute == TR_AS_FITS && o->device)
        return tr_fail(t->err, TR_ERR, "--recompute auto and --device cuda cannot be combined: "
                       "auto predicts the memory use on a CPU; give a number of layers, or "
                       "--recompute on");
    if (o->weights && o->device)
        return tr_fail(t->err, TR_ERR, "--weights and --device cuda cannot be combined: on a GPU, "
                       "the --precision of the run applies");
    return tr_check_only(t->options, only, sizeof only / sizeof *only, t->err, TR_ERR);
}

/* Checks that the options are consistent with each other. */
TR_DEF int tr_lm_check(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    const uint64_t B = tr_lm_number(t, "batch-sz", 1), split = tr_lm_number(t, "batch-split", 1);
    if (!tr_lm_check_grow(t) || !tr_lm_choose_length(t)) return 0;
    if (!tr_lm_divides(t, "batch-split", "batch-sz")) return 0;
    if (o->streams && o->random_segments)
        return tr_fail(t->err, TR_ERR, "--streams and --random-segments cannot be combined: random "
                       "segments do not continue streams");
    if (t->training && B / split % (uint64_t)tr_lm_ranks(t))
        return tr_fail(t->err, TR_ERR, "%d ranks cannot share %llu streams (%s) equally: use a "
                       "number of ranks that divides them, or another --batch-sz",
                       tr_lm_ranks(t), (unsigned long long)(B / split),
                       split > 1 ? "--batch-sz / --batch-split" : "--batch-sz");
    if (o->update_after && o->update_every <= 1 && tr_given(t->options, "update-after"))
        return tr_fail(t->err, TR_ERR, "--update-after %llu requires --update-every 2 or "
                       "more", (unsigned long long)o->update_after);
    if (!tr_lm_check_useful(t) || !tr_lm_own_file(t, "log", o->log)) return 0;
    if (!tr_lm_check_score(t)) return 0;
    if (t->training && !tr_lm_own_file(t, "best", o->best)) return 0;
    if (!tr_lm_own_file(t, "export", o->export_to)) return 0;
    if (t->training && !tr_lm_own_file(t, "checkpoint", o->checkpoint)) return 0;
    return t->kind->check(t);
}

/* Counts the tokens and bytes of each text and, if the run reports results per word,
   its words. */
TR_DEF int tr_lm_count_texts(tr_lm *t) {
    const int words = t->unit == TR_WORD_PPL || (t->unit == TR_PPL && t->more_figures);
    int32_t ids[4096];
    int part;
    for (part = 0; part < 3; part++) {
        const stx_corpus *text = t->text[part];
        tr_lm_counts *c = &t->counts[part];
        size_t n = text ? stx_corpus_size(text) : 0, at, m;
        if (!text) continue;
        c->all = c->tokens = (double)n;
        c->bytes = (double)stx_corpus_bytes(text);
        for (at = 0; t->pad_id >= 0 && at < n; at += m) {
            m = n - at < 4096 ? n - at : 4096;
            if (!stx_corpus_read(text, at, m, ids)) return tr_lm_why(t);
            c->tokens -= (double)m - tr_lm_counted(t, ids, m);
            c->bytes -= tr_lm_pad_bytes(t, ids, m);
        }
        if (!(c->tokens > 0))
            return tr_fail(t->err, TR_ERR, "--pad-id %ld: a text consists only of this token, so "
                           "it has no loss: give another text or id", (long)t->pad_id);
        if (words) c->words = tr_lm_word_count(t, text);
        if (t->unit == TR_WORD_PPL && !(c->words > 0))
            return tr_fail(t->err, TR_ERR, "--data-unit word-ppl: a text contains no words: use "
                           "another unit");
    }
    return 1;
}

/* Appends to b, one per line, the values that must be equal on all ranks before the
   ranks do anything else. If they are equal, all ranks perform the same operations in
   the same order. Returns 0 if memory runs out. */
TR_DEF int tr_lm_facts(const tr_lm *t, tr_buf *b) {
    const tr_lm_opt *o = t->opt;
    const tr_opt *p;
    const char *task = t->evaluating ? "evaluation" : "neither training nor evaluation";
    char line[200], value[64];
    snprintf(line, sizeof line, "version: %s\ntask: %s\n", STX_VERSION,
             t->training ? "training" : task);
    tr_buf_puts(b, line);
    snprintf(line, sizeof line, "--device: %s\n--shard: %s\n", o->device ? "cuda" : "cpu",
             o->shard ? "yes" : "no");
    tr_buf_puts(b, line);
    snprintf(line, sizeof line, "--checkpoint: %s\n--best: %s\n--init-from: %s\n",
             o->checkpoint ? "given" : "none", o->best ? "given" : "none",
             o->init_from ? "given" : "none");
    tr_buf_puts(b, line);
    for (p = t->options->opt; p->type != TR_T_END; p++) {
        int keep = p->keep & ~(TR_LATER | TR_KEPT);
        const char *text = value;
        if (p->type == TR_T_GROUP || keep == TR_LOCAL || keep == TR_HINT) continue;
        tr_value(p, value);
        if (p->type == TR_T_TEXT) text = *(const char *const *)p->to;
        tr_buf_puts(b, "--");
        tr_buf_puts(b, p->name);
        tr_buf_puts(b, ": ");
        tr_buf_puts(b, text ? text : "none");
        tr_buf_puts(b, "\n");
    }
    return !b->oom;
}

/* Appends to b the values that must be equal on all ranks after the texts have been
   read. The paths of the texts may differ, but not their contents. */
TR_DEF int tr_lm_more_facts(const tr_lm *t, tr_buf *b) {
    static const char *const name[3] = {"training", "validation", "test"};
    size_t len = stx_vocab_save(t->vocab, NULL, 0);
    char *vocab = (char *)malloc(len + 1);
    char line[160];
    int i;
    if (vocab && stx_vocab_save(t->vocab, vocab, len) == len) {
        snprintf(line, sizeof line, "vocabulary: %016" PRIx64 "\n",
                 tr_hash(TR_HASH_BEGIN, vocab, len));
        tr_buf_puts(b, line);
    }
    free(vocab);
    for (i = 0; i < 3; i++) {
        if (!t->text[i]) continue;
        snprintf(line, sizeof line, "%s text: %zu tokens, %016" PRIx64 "\n", name[i],
                 stx_corpus_size(t->text[i]), tr_lm_fingerprint(t->text[i]));
        tr_buf_puts(b, line);
    }
    snprintf(line, sizeof line, "checkpoint: step %" PRIu64 "\n", t->step);
    tr_buf_puts(b, line);
    return !b->oom;
}

/* Returns 1 if the two lists of facts are equal. Otherwise, returns 0 and reports the
   first difference in t->err. */
TR_DEF int tr_lm_same_facts(tr_lm *t, const char *here, const char *rank0) {
    const char *a = here, *b = rank0;
    size_t m, n, name;
    while ((*a || *b) && *a == *b) {
        m = strcspn(a, "\n");
        n = strcspn(b, "\n");
        if (m != n || memcmp(a, b, m) != 0) break;
        a += m + (a[m] != 0);
        b += n + (b[n] != 0);
    }
    if (!*a && !*b) return 1;

    m = strcspn(a, "\n");
    n = strcspn(b, "\n");
    name = strcspn(b, ":");
    if (name >= m || memcmp(a, b, name + 1) != 0)
        return tr_fail(t->err, TR_ERR, "this rank has \"%.*s\", but rank 0 has \"%.*s\": all ranks "
                       "require the same program, options and texts",
                       (int)(m < 300 ? m : 300), a, (int)(n < 300 ? n : 300), b);
    a += name + 1;
    b += name + 1;
    m -= name + 1;
    n -= name + 1;
    return tr_fail(t->err, TR_ERR, "%.*s is%.*s here, but%.*s on rank 0: all ranks require the "
                   "same program, options and texts", (int)name, b - name - 1,
                   (int)(m < 300 ? m : 300), a, (int)(n < 300 ? n : 300), b);
}

/* Refuses to run if this rank differs from rank 0, and reports the difference.
   Collective. */
TR_DEF int tr_lm_compare(tr_lm *t, int (*facts)(const tr_lm *t, tr_buf *b)) {
    tr_buf here;
    char *rank0 = NULL;
    uint64_t n;
    int ok;
    if (tr_lm_ranks(t) < 2) return 1;
    memset(&here, 0, sizeof here);
    ok = facts(t, &here) || tr_fail(t->err, TR_ERR, "out of memory: cannot compare the ranks");
    n = here.n;
    ok = ok && stx_group_broadcast(t->x, &n, sizeof n, 0);
    if (ok) {
        rank0 = (char *)calloc((size_t)n + 1, 1);
        if (!rank0) tr_fail(t->err, TR_ERR, "out of memory: cannot compare the ranks");
    }
    if (rank0 && !stx_rank(t->x)) memcpy(rank0, here.s, here.n);
    ok = rank0 && stx_group_broadcast(t->x, rank0, (size_t)n, 0);
    if (!ok && !stx_ok(t->x)) tr_lm_why(t);
    ok = ok && tr_lm_same_facts(t, here.s, rank0);
    tr_buf_free(&here);
    free(rank0);
    return ok;
}

/* Before a task that only rank 0 performs, checks that all ranks have this task: a rank
   that trained instead would wait for the others forever. Without a group engine, ranks
   never wait for each other, so nothing is checked. */
TR_DEF int tr_lm_agree_on_task(tr_lm *t) {
    stx_desc d;
    if (t->start.ranks < 2) return 1;
    memset(&d, 0, sizeof d);
    d.threads = 1;
    t->x = stx_create(&d);
    if (stx_group_join(t->x, NULL) && !tr_lm_compare(t, tr_lm_facts)) return 0;
    stx_group_leave(t->x);
    stx_destroy(t->x);
    t->x = NULL;
    return 1;
}

/* Sets t->err and returns 0 if the file's tensors have fewer elements than the model that
   the file's options describe. This is checked before the model is created, because the
   options of a damaged file can describe a model of any size. */
TR_DEF int tr_lm_file_fits(tr_lm *t, const stx_file *f, const char *path) {
    size_t params = tr_lm_count(t, stx_vocab_size(t->vocab) - t->grown), elements = 0, i;
    for (i = 0; i < stx_file_count(f); i++) elements += stx_file_entry(f, i)->count;
    if (!params || params <= elements) return params > 0;
    return tr_fail(t->err, TR_ERR, "%.600s: its options describe a model of %zu parameters, but "
                   "its tensors have only %zu elements: the file is damaged; use another copy",
                   path, params, elements);
}

/* Sets an option to a path, as if it came from the source `from`. */
TR_DEF int tr_lm_set_path(tr_lm *t, const char *name, const char *path, int from) {
    tr_opt *o = tr_find_option(t->options, name, strlen(name));
    if (!path) return tr_fail(t->err, TR_ERR, "out of memory: cannot store the path of a file");
    return tr_set(o, path, from, t->err, TR_ERR);
}

/* A run with --minutes, a checkpoint and a validation text keeps the best model even
   without --keep-best. */
TR_DEF int tr_lm_suggest_best(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    char *path;
    int ok;
    if (!tr_lm_timed(t) || !o->checkpoint || o->best || !t->text[1]) return 1;
    path = tr_path_with(o->checkpoint, ".best");
    ok = tr_lm_set_path(t, "best", path, TR_FROM_TEXT);
    free(path);
    return ok && tr_lm_own_file(t, "best", o->best);
}

/* Opens the texts, and determines the run's sizes and plan. */
TR_DEF int tr_lm_prepare_text(tr_lm *t, int reads_text, int resumes) {
    const tr_lm_opt *o = t->opt;
    const char *best = o->keep_best ? "keep-best" : "best";
    if (reads_text && !tr_lm_data(t)) return 0;
    if (t->training && !resumes && (!tr_lm_size(t) || !tr_lm_check(t))) return 0;
    if (t->training && o->streams && !tr_lm_divides(t, "batch-sz", "streams")) return 0;
    if (t->training && !tr_lm_suggest_best(t)) return 0;
    if (t->training && o->best && !t->text[1])
        return tr_fail(t->err, TR_ERR, "--%s requires a validation text", best);
    t->unit = o->unit;
    if (!t->unit) t->unit = o->tokens >= TR_WORDS ? TR_PPL : TR_BPC;
    t->kind->plan(t);
    if (t->training && !tr_lm_begin_plan(t)) return 0;
    if (t->training && o->best && !t->eval_every && !t->plan_count)
        return tr_fail(t->err, TR_ERR, "--%s requires --eval-every", best);
    return tr_lm_count_texts(t);
}

/* Creates the model, and loads the checkpoint at path if there is one. */
TR_DEF int tr_lm_prepare_model(tr_lm *t, const stx_file *f, const char *path) {
    const tr_lm_opt *o = t->opt;
    t->recompute = o->recompute > 0 ? (size_t)o->recompute : 0;
    if (t->training && o->recompute == TR_AS_FITS) {
        void *copy = malloc(t->kind->size);
        if (!copy)
            return tr_fail(t->err, TR_ERR, "--recompute auto: out of memory: cannot copy the run");
        memcpy(copy, t, t->kind->size);
        t->before_make = copy;
    }
    if (f && !tr_lm_file_fits(t, f, path)) return 0;
    if (!t->kind->make(t)) return 0;
    if (f && !tr_lm_load(t, f)) return tr_fail(t->err, TR_ERR, "%s: %s", path, stx_error(t->x));
    return 1;
}

/* Rounds the weight matrices to the format of --weights. */
TR_DEF int tr_lm_pack(tr_lm *t) {
    const int kind = t->opt->weights == 1 ? STX_WEIGHTS_BF16 : STX_WEIGHTS_INT8;
    if (!t->opt->weights) return 1;
    t->packed = stx_params_pack(t->lm.params, kind);
    if (!stx_ok(t->x)) return tr_fail(t->err, TR_ERR, "--weights: %s", stx_error(t->x));
    if (t->packed) return 1;
    return tr_fail(t->err, TR_ERR,
                   "--weights has no effect: the model has no matrix of %d x %d or larger",
                   STX_PACK_MIN, STX_PACK_MIN);
}

/* Reports every error that can be found before the first step, and before any file is
   written. Opens the checkpoint first, because it determines the model, the precision and
   the vocabulary. */
TR_DEF int tr_lm_prepare(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    const char *path = o->init_from ? o->init_from : o->checkpoint;
    int reads_text = t->training || !o->no_train || tr_given(t->options, "data"), ok;
    stx_file *f = NULL;
    if (!tr_lm_context(t)) return 0;
    if (!t->training && o->init_from)
        return tr_fail(t->err, TR_ERR, "--init-from %.400s is only for training: to evaluate, "
                       "score or sample, give the file as --checkpoint", o->init_from);
    if (!t->training && !o->checkpoint)
        return tr_fail(t->err, TR_ERR,
                       "evaluation and generation without training require --checkpoint");
    if (o->interactive || o->score) reads_text = 0;

    ok = tr_lm_check_unclaimed(t) && tr_lm_open_checkpoint(t, &f);
    ok = ok && tr_lm_join(t) && tr_lm_compare(t, tr_lm_facts) && tr_lm_check(t);
    ok = ok && tr_lm_prepare_text(t, reads_text, f && !o->init_from);
    ok = ok && tr_lm_prepare_model(t, f, path);
    stx_file_close(f);
    if (ok && t->before_make) ok = tr_lm_choose(t);
    ok = ok && tr_lm_pack(t);
    ok = ok && tr_lm_compare(t, tr_lm_facts) && tr_lm_compare(t, tr_lm_more_facts);
    if (ok && !stx_group_broadcast_params(t->lm.params)) ok = tr_lm_why(t);
    return ok && tr_lm_open(t);
}

/* Reports why the run failed and returns the exit code. */
TR_DEF int tr_lm_failed(tr_lm *t) {
    const int code = stx_error_code(t->x);
    const int early = !t->begun && (code == STX_ERR_MEMORY || code == STX_ERR_IO);
    tr_lm_why(t);
    return tr_lm_end(t, t->err, early && !tr_lm_lost(t) ? 2 : 1);
}

/* Reports how much of the training text (its first million tokens) is <unk> in the
   vocabulary of --init-from. */
TR_DEF void tr_lm_report_unknown_share(tr_lm *t) {
    const int32_t unk = stx_vocab_unk(t->vocab);
    int32_t ids[4096];
    uint64_t n = stx_corpus_size(t->text[0]), at, unknown = 0;
    size_t m, i;
    if (n > 1000000) n = 1000000;
    for (at = 0; unk >= 0 && at < n; at += m) {
        m = n - at < 4096 ? (size_t)(n - at) : 4096;
        if (!stx_corpus_read(t->text[0], at, m, ids)) return;       /* training reports the error */
        for (i = 0; i < m; i++) unknown += ids[i] == unk;
    }
    if (unknown)
        tr_say(&t->term, "%.1f %% of the training text is <unk>: words that the vocabulary of "
               "--init-from lacks%s", 100.0 * (double)unknown / (double)n,
               t->base ? " and that occur less often than --min-count" : "");
}

/* Trains. With --init-from, first evaluates the model, because the model before
   fine-tuning may be the best one. Returns 0 on error. */
TR_DEF int tr_lm_run_training(tr_lm *t) {
    double nll;
    int ok = 1;
    t->saved = t->step;
    t->loss = (double)NAN;
    t->began = tr_seconds();
    if (t->opt->init_from) {
        tr_lm_report_unknown_share(t);
        ok = tr_lm_evaluate(t, 1, t->eval_blocks, &nll);
        if (tr_lm_timed(t)) nll = (double)NAN;  /* later evaluations read other blocks */
        if (ok) tr_lm_judge(t, nll);
        if (ok && t->opt->best && tr_lm_better(t, nll)) ok = tr_lm_save_best(t);
    }
    tr_rate_start(&t->rate, tr_seconds());
    if (ok) t->kind->train(t);
    return tr_lm_trained(t);
}

/* Runs the evaluations that give the results of the run. If --best has just evaluated
   this step, prints that result instead. */
TR_DEF int tr_lm_run_evaluation(tr_lm *t) {
    uint64_t blocks = t->training && tr_given(t->options, "eval-blocks") ? t->opt->eval_blocks : 0;
    double nll;
    int ok = 1;
    t->last = 1;
    if (t->evaluated != t->step || t->blocks != blocks)
        ok = tr_lm_evaluate(t, 1, blocks, &nll);
    else if (tr_lm_results(t) == stdout && !stx_rank(t->x))
        printf("%s\n", t->result);
    if (ok && !t->training) ok = tr_lm_evaluate(t, 2, 0, &nll);
    return ok;
}

/* Prints what the model learned, unless the run only generates. If standard output cannot
   be written, reports this, and returns 0 unless the run has trained. */
TR_DEF int tr_lm_print_results(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    int ok = 1;
    if (!tr_lm_stop(t)) ok = tr_lm_begin(t);        /* no effect if a step already called it */
    if (ok && !tr_lm_stop(t) && !stx_rank(t->x)) {
        if (t->training || t->evaluating || !o->generate) t->kind->learned(t, tr_lm_results(t));
        ok = stx_ok(t->x);
    }
    if (!ok || (!fflush(stdout) && !ferror(stdout))) return ok;
    if (t->training) {
        fprintf(stderr, "%s: the results cannot be written: %s\n",
                o->log ? o->log : t->options->program, strerror(errno));
    } else {
        stx_fail(t->x, STX_ERR_IO, "the results cannot be written: %s", strerror(errno));
        ok = 0;
    }
    clearerr(stdout);
    return ok;
}

/* Prints where the run stopped. */
TR_DEF void tr_lm_print_stopped(const tr_lm *t) {
    const char *saved = "";
    if (!t->training) {
        fprintf(stderr, "%s: stopped before the end\n", t->options->program);
        return;
    }
    if (!t->opt->checkpoint) saved = "; nothing is saved without --checkpoint";
    else if (t->step > t->first) saved = "; the checkpoint is saved, the same command resumes it";
    fprintf(stderr, "stopped at step %llu%s\n", (unsigned long long)t->step, saved);
}

/* Prints where the model of a finished run is saved. */
TR_DEF void tr_lm_print_saved(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    if (!t->training || !o->checkpoint || t->step == t->first) return;
    if (o->best && !isnan(t->best))
        tr_say(&t->term, "saved in %.500s; the best evaluated model is in %.500s", o->checkpoint,
               o->best);
    else
        tr_say(&t->term, "saved in %.500s", o->checkpoint);
}

/* Runs what the options request: training, evaluation, generation, a conversation or
   scoring. Returns the exit code. */
TR_DEF int tr_lm_run(tr_lm *t, int evaluating) {
    const tr_lm_opt *o = t->opt;
    size_t refused = 0;
    int ok = 1, stop;
    tr_lm_hello(t);
    if (o->interactive || o->score) {
        ok = o->interactive ? tr_lm_talk(t, &refused) : tr_lm_score(t);
        if (!ok) return tr_lm_failed(t);
        stop = tr_stop_requested();
        return stop ? 128 + stop : refused && !isatty(0);
    }

    if (t->training) ok = tr_lm_run_training(t);
    if (ok && !tr_lm_stop(t) && (t->training || (evaluating && !t->no_evaluation)))
        ok = tr_lm_run_evaluation(t);
    tr_term_close(&t->term);
    ok = ok && tr_lm_print_results(t);
    if (ok && !tr_lm_stop(t)) tr_lm_print_saved(t);
    if (ok && !tr_lm_stop(t) && o->export_to && !stx_rank(t->x)) ok = tr_lm_export(t);
    if (ok && !tr_lm_stop(t) && o->generate && !stx_rank(t->x)) ok = tr_lm_generate(t);
    if (!ok) return tr_lm_failed(t);

    stop = tr_lm_stop(t);
    /* a signal may have arrived while only rank 0 was running */
    if (!stop && !stx_rank(t->x)) stop = tr_stop_requested();
    if (stop && !stx_rank(t->x)) tr_lm_print_stopped(t);
    return stop ? 128 + stop : 0;
}

/* Replaces --out by --checkpoint and, in training, --log and --tensorboard. */
TR_DEF int tr_lm_expand_out(tr_lm *t) {
    static const char *const name[3] = {"checkpoint", "log", "tensorboard"};
    static const char *const file[3] = {TR_LM_OUT, "log.jsonl", "tb"};
    const char *out = t->opt->out;
    struct stat st;
    int i, ok = 1;
    if (!out) return 1;
    if (!*out) return tr_fail(t->err, TR_ERR, "--out: expected the name of a directory, got ''");
    if (stat(out, &st) == 0) {
        if (!S_ISDIR(st.st_mode))
            return tr_fail(t->err, TR_ERR, "--out %s: expected a directory, got a file", out);
    } else if (errno != ENOENT) {
        return tr_fail(t->err, TR_ERR, "--out %s: %s", out, strerror(errno));
    }
    for (i = 0; ok && i < (t->training ? 3 : 1); i++) {
        char *path;
        if (tr_given(t->options, name[i])) continue;
        path = tr_path_in(out, file[i]);
        ok = tr_lm_set_path(t, name[i], path, TR_FROM_ARGS);
        free(path);
    }
    return ok;
}

/* Replaces --keep-best by --best. */
TR_DEF int tr_lm_expand_keep_best(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    char *path;
    int ok;
    if (!t->training || !o->keep_best) return 1;
    if (o->best) return tr_fail(t->err, TR_ERR, "--best and --keep-best cannot be combined");
    if (!o->checkpoint || !*o->checkpoint)
        return tr_fail(t->err, TR_ERR,
                       "--keep-best requires --checkpoint, from which the name of the best "
                       "model's file is derived");
    path = tr_path_with(o->checkpoint, ".best");
    ok = tr_lm_set_path(t, "best", path, TR_FROM_ARGS);
    free(path);
    return ok;
}

/* Refuses options that --interactive or --score would ignore, because either of the two
   excludes all other tasks. */
TR_DEF int tr_lm_check_alone(tr_lm *t, const char *name, int evaluating, const int *evaluate) {
    const tr_lm_opt *o = t->opt;
    const tr_opt *p;
    if (o->interactive && o->prompt && !strcmp(o->prompt, "-"))
        return tr_fail(t->err, TR_ERR, "--prompt - and --interactive cannot be combined: standard "
                       "input is used for the conversation; give the prompt on the command line");
    if (o->score && (o->interactive || o->generate))
        return tr_fail(t->err, TR_ERR, "--score and --%s cannot be combined",
                       o->interactive ? "interactive" : "generate");
    if (!evaluating) return 1;
    for (p = t->options->opt; p->type != TR_T_END; p++) {
        int requests = p->to == (const void *)&o->eval_only || p->to == (const void *)evaluate;
        if (p->type == TR_T_FLAG && requests && *(const int *)p->to)
            return tr_fail(t->err, TR_ERR, "--%s and --%s cannot be combined", name, p->name);
    }
    return tr_fail(t->err, TR_ERR, "--%s cannot be combined with an evaluation", name);
}

#ifdef _WIN32
#define TR_NOWHERE "NUL"
#else
#define TR_NOWHERE "/dev/null"
#endif

/* Dispatches to the task that the options request and returns the exit code. */
TR_DEF int tr_lm_do(tr_lm *t, const int *evaluate) {
    const tr_lm_opt *o = t->opt;
    const int evaluating = o->eval_only || (evaluate && *evaluate);
    const int prints = o->version || o->list_presets || o->dry_run;
    const int alone = o->interactive || o->score, other = prints || alone;
    t->only_generates = !evaluating && !o->no_train && !other && tr_lm_only_generates(t);
    if (t->only_generates) *(int *)tr_find_option(t->options, "no-train", 8)->to = 1;
    t->training = !evaluating && !o->no_train && !other;
    t->evaluating = evaluating && !other;
    if (!t->training && !t->evaluating) {
        if (!tr_lm_agree_on_task(t)) return tr_lm_refuse(t);
        if (t->start.rank) return 0;
    }
    if (o->version) {
        printf("%s, seqtx %s\n", t->options->program, STX_VERSION);
        return tr_lm_flush(t) ? 0 : tr_lm_refuse(t);
    }
    if (!tr_lm_expand_out(t) || !tr_lm_expand_keep_best(t)) return tr_lm_refuse(t);
    if (alone && !tr_lm_check_alone(t, o->score ? "score" : "interactive", evaluating, evaluate))
        return tr_lm_refuse(t);
    if (o->list_presets) return tr_lm_list_presets(t) ? 0 : tr_lm_refuse(t);
    if (o->dry_run) return tr_lm_dry_run(t) ? 0 : tr_lm_refuse(t);
    return tr_lm_prepare(t) ? tr_lm_run(t, evaluating) : tr_lm_refuse(t);
}

/* Without arguments: says what to type. Returns the exit code of invalid options. */
TR_DEF int tr_lm_no_arguments(const tr_options *o, int argc, char **argv, int rank) {
    tr_buf b;
    memset(&b, 0, sizeof b);
    tr_help_examples(o, tr_called(o, argc, argv), &b);
    if (!rank && !b.oom)
        fprintf(stderr, "%s: give a text to train on, or a trained model. For example:\n%s"
                "--help explains the most important options, and --help all lists all\n",
                o->program, b.s);
    tr_buf_free(&b);
    return 2;
}

/* Reads the command line, runs the program and returns the exit code. t is the first
   member of the trainer's struct, which must be zeroed. evaluate points to the trainer's
   option that requests evaluation without training, or is NULL. */
TR_DEF int tr_lm_main(tr_lm *t, const tr_lm_kind *kind, tr_options *options, const tr_lm_opt *opt,
                      const int *evaluate, int argc, char **argv) {
    int code = 0;
    t->options = options;
    t->opt = opt;
    t->kind = kind;
    t->start = stx_get_launch_info();
    if (argc < 2) return tr_lm_no_arguments(options, argc, argv, t->start.rank);
    /* only rank 0 prints results and help */
    if (t->start.rank > 0 && !freopen(TR_NOWHERE, "w", stdout)) return 1;
    t->best = t->best_seen = (double)NAN;
    t->evaluated = UINT64_MAX;
    t->pad_id = -1;
    t->log.out.fd = t->board.out.fd = -1;
    tr_standard_streams();

    switch (tr_parse(options, argc, argv, t->err, TR_ERR)) {
    case 0: code = tr_lm_refuse(t); break;
    case 2: code = tr_lm_agree_on_task(t) ? 0 : tr_lm_refuse(t); break;     /* --help */
    default: code = tr_lm_do(t, evaluate);
    }
    if (code != 1 && code != 2) stx_group_leave(t->x);      /* with codes 1 and 2, the group was
                                                               aborted */
    tr_lm_close(t);
    return code;
}
