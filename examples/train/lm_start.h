#pragma once
#include "base.h"
#include "buffer.h"
#include "options.h"
#include "options_set.h"
#include "options_checkpoint.h"
#include "files.h"
#include "log.h"
#include "formats.h"
#include "terminal.h"
#include "tensorboard.h"
#include "signals.h"
#include "lm.h"
#include "lm_context.h"
#include "lm_errors.h"
#include "lm_text.h"
#include "lm_minutes.h"


// >>lm: start and end of a run

/* Reads standard input to its end and drops the final newline. */
TR_DEF int tr_lm_read_stdin(tr_lm *t, tr_buf *b) {
    char piece[4096];
    size_t n;
    while ((n = fread(piece, 1, sizeof piece, stdin)) > 0) tr_buf_put(b, piece, n);
    if (ferror(stdin))
        return tr_fail(t->err, TR_ERR, "--prompt -: cannot read standard input: %s",
                       strerror(errno));
    if (b->n && b->s[b->n - 1] == '\n') b->n--;
    if (b->n && b->s[b->n - 1] == '\r') b->n--;
    return 1;
}

/* Stores the text of --prompt in t->prompt. For "-", reads it from standard input. */
TR_DEF int tr_lm_prompt(tr_lm *t) {
    const char *text = t->opt->prompt;
    char why[TR_ERR];
    tr_buf b;
    memset(&b, 0, sizeof b);
    if (!text || !*text) return 1;
    if (strcmp(text, "-") != 0) {
        tr_buf_puts(&b, text);
    } else if (!tr_lm_read_stdin(t, &b)) {
        tr_buf_free(&b);
        return 0;
    }
    if (b.oom) {
        tr_buf_free(&b);
        return tr_fail(t->err, TR_ERR, "--prompt: out of memory: cannot store the text");
    }
    t->prompt = b.s;
    if (b.n && stx_vocab_encode(t->vocab, b.s, b.n, NULL, 0) == STX_NPOS) {
        tr_lm_why(t);
        snprintf(why, sizeof why, "%s", t->err);
        return tr_fail(t->err, TR_ERR, "--prompt: %.1000s", why);
    }
    if (b.n) t->prompt_len = tr_lm_unmark(t, b.s, b.n);
    return 1;
}

/* Creates the directory of --out unless it exists. */
TR_DEF int tr_lm_make_out(tr_lm *t) {
    const char *dir = t->opt->out;
    struct stat st;
    char why[TR_ERR];
    int exists = stat(dir, &st) == 0;
    if (!tr_mkdirs(dir, why, sizeof why)) return tr_fail(t->err, TR_ERR, "--out %.900s", why);
    if (exists) return 1;
    t->made_dir = strdup(dir);
    if (t->made_dir) return 1;
    return tr_fail(t->err, TR_ERR, "--out: out of memory: cannot store the path");
}

/* Copies --stop to t->stop and decodes its escapes. */
TR_DEF int tr_lm_stop_text(tr_lm *t) {
    const char *text = t->opt->stop;
    if (!text) return 1;
    if (!*text) return tr_fail(t->err, TR_ERR, "--stop: expected a text, got ''");
    t->stop = strdup(text);
    if (!t->stop) return tr_fail(t->err, TR_ERR, "--stop: out of memory: cannot store the text");
    tr_unescape(t->stop);
    return 1;
}

/* Performs the last checks before the first step and installs the signal handlers.
   Creates a directory but no file. */
TR_DEF int tr_lm_open(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    char *err = t->err;
    struct stat st;
    if (!tr_lm_prompt(t) || !tr_lm_stop_text(t)) return 0;
    if (o->tensorboard && !stat(o->tensorboard, &st) && !S_ISDIR(st.st_mode))
        return tr_fail(err, TR_ERR, "--tensorboard %s: expected a directory, got a file",
                       o->tensorboard);
    t->config = tr_options_json(t->options, 1);
    if (!t->config) return tr_fail(err, TR_ERR, "out of memory: cannot write the options");
    if (stx_rank(t->x)) return tr_signals(0, err, TR_ERR);      /* rank 0 writes the files */

    if (t->training) {
        if (o->out && !tr_lm_make_out(t)) return 0;
        if (o->checkpoint && !tr_can_write("checkpoint", o->checkpoint, 0, err, TR_ERR)) return 0;
        if (o->best && !tr_can_write("best", o->best, 0, err, TR_ERR)) return 0;
    }
    if (o->export_to && !tr_can_write("export", o->export_to, 0, err, TR_ERR)) return 0;
    if (o->log && strncmp(o->log, "/dev/", 5)) {
        if (!tr_can_write("log", o->log, 1, err, TR_ERR)) return 0;
        if (!tr_log_here(o->log, err, TR_ERR)) return 0;
    }
    return tr_signals(t->training && !o->checkpoint && isatty(2), err, TR_ERR);
}

/* Returns the name of the k-th option (0, 1, 2) that names an output file. *path
   receives the path of that file, or NULL if this run does not write it. */
TR_DEF const char *tr_lm_output(const tr_lm *t, int k, const char **path) {
    static const char *const name[3] = {"checkpoint", "best", "log"};
    const tr_lm_opt *o = t->opt;
    *path = NULL;
    if (t->training && k == 0) *path = o->checkpoint;
    if (t->training && k == 1) *path = o->best;
    if (k == 2) *path = o->log;
    return name[k];
}

/* Refuses files that another run is writing. Only rank 0 checks; nothing is claimed
   yet. */
TR_DEF int tr_lm_check_unclaimed(tr_lm *t) {
    const char *path, *name;
    int k;
    if (t->start.rank > 0) return 1;
    for (k = 0; k < 3; k++) {
        name = tr_lm_output(t, k, &path);
        if (path && !tr_unclaimed(name, path, t->err, TR_ERR)) return 0;
    }
    return 1;
}

/* Claims the output files. Refuses the checkpoint if another run has written to it
   since this run opened it, because saving would overwrite that run's progress. */
TR_DEF int tr_lm_claim(tr_lm *t) {
    const char *path, *name, *seal;
    struct stat st;
    stx_file *f;
    int k, same;
    for (k = 0; k < 3; k++) {
        name = tr_lm_output(t, k, &path);
        if (!tr_claim_open(&t->claim[k], name, path, t->err, TR_ERR)) return 0;
    }
    path = t->opt->checkpoint;
    if (!t->training || !path) return 1;

    same = !t->found_seal[0];
    if (stat(path, &st) == 0) {
        f = stx_file_open(t->x, path);
        if (!f) return tr_lm_why(t);
        seal = stx_file_meta(f, "seal");
        same = seal && !strcmp(seal, t->found_seal);
        stx_file_close(f);
    }
    if (same) return 1;
    return tr_fail(t->err, TR_ERR, "--checkpoint %.900s: another run has written this file since "
                   "this run started: repeat the command to resume from it", path);
}

/* Writes the first record of the log. */
TR_DEF void tr_lm_log_start(tr_lm *t) {
    char *config = tr_options_json(t->options, 0);
    tr_log_begin(&t->log, t->first ? "resume" : "start");
    if (t->first) tr_log_int(&t->log, "step", t->first);
    tr_log_json(&t->log, "config", config);
    tr_log_int(&t->log, "params", stx_params_size(t->lm.params));
    if (tr_lm_decided(t, "freeze"))
        tr_log_int(&t->log, "trained", stx_params_trained_size(t->lm.params));
    if (t->predicted) tr_log_int(&t->log, "recomputed", t->recompute);
    if (t->predicted) tr_log_int(&t->log, "predicted_bytes", t->predicted);
    if (t->first) tr_log_json(&t->log, "changed", t->adopted.json.n ? t->adopted.json.s : "{}");
    if (t->first && t->adopted.given.n)
        tr_log_str(&t->log, "not_in_checkpoint", t->adopted.given.s);
    free(config);
    if (!tr_log_end(&t->log)) tr_say(&t->term, "%s: %s", t->options->program, t->log.err);
}

/* Opens the log and the event file and writes the first record. Called after the first
   step or evaluation has succeeded, so that a run that fails earlier leaves no files.
   Later calls do nothing. Returns 0 and sets t->err on failure. */
TR_DEF int tr_lm_begin(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    const uint64_t resumed = t->training ? t->first : 0;
    int ok;
    if (t->begun || stx_rank(t->x)) {
        t->begun = 1;
        return 1;
    }
    /* lines of later steps are removed only if training resumes, because it writes them
       again */
    ok = tr_lm_claim(t);
    ok = ok && tr_board_open(&t->board, o->tensorboard, resumed, t->err, TR_ERR);
    ok = ok && tr_log_open(&t->log, o->log, resumed ? resumed : TR_KEEP_ALL, t->err, TR_ERR);
    if (!ok) {
        stx_fail(t->x, STX_ERR_IO, "%s", t->err);
        return 0;
    }
    t->begun = 1;
    if (t->training && !(t->first && t->first >= t->steps)) tr_lm_log_start(t);
    return 1;
}

/* Prints the first lines of a training run. */
TR_DEF void tr_lm_hello_training(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    static const char *const names[] = {"bytes", "bytes", "characters", "words"};
    const char *what = o->tokens <= TR_WORDS ? names[o->tokens] : "pieces";
    char peak[TR_TEXT_MAX], limit[TR_TEXT_MAX];
    if (t->predicted) {
        tr_bytes(peak, (double)t->predicted);
        tr_bytes(limit, (double)stx_ctx_desc(t->x)->max_bytes);
        tr_say(&t->term, "recomputing %zu of %zu layers; predicted peak %s, limit %s",
               t->recompute, t->layers, peak, limit);
    }
    if (o->init_from)
        tr_say(&t->term, "weights of %.1000s; optimiser, schedule and memories start afresh",
               o->init_from);
    if (t->base && t->grown)
        tr_say(&t->term, "--grow-vocab: %zu %s appended to the %zu of the vocabulary; their "
               "weights start afresh", t->grown, what, stx_vocab_size(t->base));
    else if (t->base)
        tr_say(&t->term, "--grow-vocab: the text has no new %s for the vocabulary", what);
    if (t->unk_added)
        tr_say(&t->term, "the validation or test text has %s that the %s; they, and %s that the "
               "training text contains only once, are read as <unk> (--min-count 2; --min-count 1 "
               "refuses such texts)", what,
               t->base ? "vocabulary and the training text lack" : "training text lacks",
               t->base ? "new ones" : "those");
    if (t->sized.n)
        tr_say(&t->term, "no --preset; chosen for the text and the time:%s", t->sized.s);
    if (t->first && t->adopted.given.n)
        tr_say(&t->term, "not in the checkpoint, taken from the command line or preset: %.1500s",
               t->adopted.given.s);
    if (t->first && t->adopted.changed.n)
        tr_say(&t->term, "resuming with changed options (old values in brackets): %.1500s",
               t->adopted.changed.s);
    if (t->first && t->step >= t->steps)
        tr_say(&t->term, "the run is complete; more --steps or --minutes continue it");
    else if (!o->checkpoint)
        tr_say(&t->term, "no --checkpoint: nothing will be saved; with --checkpoint FILE, the "
               "model is saved and the run can be resumed");
}

/* Says it if there are more threads than processors. */
TR_DEF void tr_lm_hello_threads(tr_lm *t, int threads) {
    stx_ctx *x = stx_create(NULL);          /* its default: a thread per processor */
    const int n = stx_threads(x);
    stx_destroy(x);
    if (threads > n)
        tr_say(&t->term, "--threads %d, but %d processor%s: threads wait for each other; without "
               "--threads, there is one per processor", threads, n, tr_s((uint64_t)n));
}

/* Prints the first lines of the run. */
TR_DEF void tr_lm_hello(tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    const int threads = stx_threads(t->x);
    const char *precision = o->precision ? "bf16 matmuls" : "f32";
    char size[TR_TEXT_MAX], mem[TR_TEXT_MAX], length[64];
    size_t trained;
    tr_term_open(&t->term, stx_rank(t->x) ? NULL : stderr);
    if (tr_lm_ranks(t) > 1) tr_say(&t->term, "%d ranks; this is rank 0", tr_lm_ranks(t));

    if (threads > 1) tr_lm_hello_threads(t, threads);
    tr_count(size, (double)stx_params_size(t->lm.params));
    tr_bytes(mem, (double)stx_bytes(t->x));
    trained = stx_params_trained_size(t->lm.params);
    if (o->device) {
        if (o->precision) precision = "bf16";
        else if (o->tf32) precision = "f32 (TF32 matmuls)";
        tr_say(&t->term, "%s parameters, vocabulary %zu, %s, %s, %s of its memory so far", size,
               stx_vocab_size(t->vocab), stx_backend(t->x), precision, mem);
    } else {
        tr_say(&t->term, "%s parameters, vocabulary %zu, %d thread%s, %s, %s so far",
               size, stx_vocab_size(t->vocab), threads, tr_s((uint64_t)threads), precision, mem);
    }
    if (trained < stx_params_size(t->lm.params)) {
        tr_count(size, (double)trained);
        tr_say(&t->term, "%s parameters are trained, the others are frozen", size);
    }
    if (o->weights) {
        tr_bytes(size, (double)t->packed);
        tr_say(&t->term, "matrices rounded to %s; generation reads up to %s of them per token",
               o->weights == 1 ? "bf16" : "int8", size);
    }
    if (t->text[0]) {
        int stored = tr_find_option(t->options, "data", 4)->from == TR_FROM_CHECKPOINT;
        tr_bytes(size, (double)stx_corpus_bytes(t->text[0]));
        /* the length of a timed run is not known before its first steps */
        snprintf(length, sizeof length, "%llu", (unsigned long long)t->steps);
        if (tr_lm_timed(t) && !t->step)
            snprintf(length, sizeof length, "as many as fit into %g minutes", o->minutes);
        tr_say(&t->term, "training text%s%.1000s: %s, %zu tokens; step %llu of %s",
               stored ? " of the checkpoint, " : "", stored ? o->data : "", size,
               stx_corpus_size(t->text[0]), (unsigned long long)t->step, length);
    }
    if (t->only_generates)
        tr_say(&t->term, "only generates, as with --no-train; with --data, training resumes first");
    if (t->training) tr_lm_hello_training(t);
}

TR_DEF void tr_lm_close(tr_lm *t) {
    int part;
    tr_watched.n = 0;
    for (part = 0; part < 3; part++) {
        stx_corpus_close(t->text[part]);
        free(t->file[part]);
    }
    stx_batches_free(t->batches);
    stx_vocab_free(t->vocab);
    stx_vocab_free(t->base);
    tr_log_close(&t->log);
    tr_board_close(&t->board);
    tr_adopted_free(&t->adopted);
    tr_buf_free(&t->sized);
    tr_options_free(t->options);
    free(t->before_make);
    free(t->config);
    free(t->prompt);
    free(t->stop);
    for (part = 0; part < 3; part++) tr_claim_close(&t->claim[part]);
    if (t->made_dir && !t->begun) rmdir(t->made_dir);       /* nothing was written */
    free(t->made_dir);
    free(t->gathered);
    free(t->all_tokens);
    stx_destroy(t->x);
}
