#pragma once
#include "base.h"
#include "buffer.h"
#include "options.h"
#include "options_checkpoint.h"
#include "lm.h"
#include "lm_errors.h"
#include "lm_context.h"
#include "lm_text.h"
#include "lm_minutes.h"
#include "lm_groups.h"


// >>lm: training state

/* Checks that a stream is long enough for the `freq` blocks of an update, and that the
   text is long enough for one segment of --random-segments. */
TR_DEF int tr_lm_long_enough(tr_lm *t, uint64_t freq, uint64_t T) {
    const uint64_t segment = t->opt->random_segments;
    const size_t size = stx_corpus_size(t->text[0]);
    if (t->batches && freq > 1 && stx_batches_stream(t->batches) <= freq * T)
        return tr_fail(t->err, TR_ERR, "--update-param-freq %llu: expected streams of at least "
                       "%llu tokens for that many blocks of %llu tokens, got %zu",
                       (unsigned long long)freq, (unsigned long long)(freq * T + 1),
                       (unsigned long long)T, stx_batches_stream(t->batches));
    if (segment && segment >= size / T)
        return tr_fail(t->err, TR_ERR, "--random-segments %llu: expected a training text of at "
                       "least %llu tokens for that many blocks of %llu tokens, got %zu",
                       (unsigned long long)segment, (unsigned long long)((segment + 1) * T),
                       (unsigned long long)T, size);
    return 1;
}

/* Creates the objects that training requires, once t->lm exists: batches, the
   optimiser, a state for each part of the batch, and buffers for the `freq` blocks of
   an update. */
TR_DEF int tr_lm_make(tr_lm *t, const stx_optim_desc *od, uint64_t freq) {
    const uint64_t B = tr_lm_number(t, "batch-sz", 1), T = tr_lm_number(t, "block-sz", 1);
    stx_optim_desc desc = *od;
    size_t tokens, k, rows;
    t->parts = (size_t)tr_lm_number(t, "batch-split", 1);
    t->pieces = t->parts * (size_t)freq;
    rows = (size_t)B / t->parts / (size_t)tr_lm_ranks(t);
    t->groups = (size_t)(tr_lm_streams(t) / B);
    tokens = t->groups * (size_t)(freq * B * T);
    if (!tr_lm_batches(t, t->groups * B, T) || !tr_lm_long_enough(t, freq, T)) return 0;

    if (!tr_lm_groups(t, &desc)) return 0;
    if (t->opt->update_every > 1) t->grads = stx_params_grads(t->lm.params, &t->grads_size);
    t->optim = stx_optim_create(t->lm.params, &desc);
    t->states = (void **)stx_block(t->x, t->groups * t->parts * sizeof *t->states);
    t->state = t->states;
    t->in = (stx_ids **)stx_block(t->x, 2 * t->pieces * sizeof *t->in);
    t->out = t->in + t->pieces;
    t->all_tokens = (int32_t *)malloc(2 * tokens * sizeof *t->all_tokens);
    t->all_targets = t->all_tokens + tokens;
    t->tokens = t->all_tokens;
    t->targets = t->all_targets;
    if (!t->tokens)
        stx_fail(t->x, STX_ERR_MEMORY, "out of memory: cannot allocate %zu tokens", tokens);
    for (k = 0; t->states && k < t->groups * t->parts; k++)
        t->states[k] = t->lm.state_create(t->lm.model, rows, 0);
    for (k = 0; t->in && k < t->pieces; k++) {
        t->in[k] = stx_tokens_create(t->x, rows, (size_t)T);
        t->out[k] = stx_tokens_create(t->x, rows, (size_t)T);
    }
    t->layers = t->lm.recompute(t->lm.model, SIZE_MAX);
    t->recompute = t->lm.recompute(t->lm.model, t->recompute);
    return stx_ok(t->x) ? 1 : tr_lm_why(t);
}


// >>lm: checkpoint. One file contains parameters, optimiser, states, step, random state,
// position in the text, vocabulary and options.

/* Returns the number of steps since the last update. Their gradients are accumulated
   for the next update. */
TR_DEF uint64_t tr_lm_pending(const tr_lm *t) {
    const tr_lm_opt *o = t->opt;
    if (o->update_every < 2 || t->step <= o->update_after) return 0;
    return (t->step - o->update_after) % o->update_every;
}

/* Creates a writer and adds everything except the states and the vocabulary. Returns NULL
   on error. */
TR_DEF stx_writer *tr_lm_save_begin(tr_lm *t) {
    stx_writer *w = stx_writer_create(t->x);
    const int between = t->step % t->groups != 0;   /* some groups have not read their blocks */
    stx_batches_state pos = between ? t->all_from : stx_batches_get(t->batches);
    char text[32];
    int ok = w != NULL;
    ok = ok && stx_writer_meta(w, "format", t->kind->format);
    ok = ok && stx_writer_meta(w, "config", t->config);
    if (ok && t->plan_count) ok = tr_lm_save_plan(t, w);
    ok = ok && stx_writer_meta_u64(w, "step", t->step);
    ok = ok && stx_writer_meta_u64(w, "tick", stx_step_index(t->x));
    ok = ok && stx_writer_meta_u64(w, "seed", t->opt->seed);
    ok = ok && stx_writer_meta_u64(w, "data.tokens", stx_corpus_size(t->text[0]));
    ok = ok && stx_writer_meta_u64(w, "data.print", t->fingerprint);
    ok = ok && stx_writer_meta_u64(w, "data.position", pos.p);
    ok = ok && stx_writer_meta_u64(w, "data.wraps", pos.wraps);
    ok = ok && stx_writer_meta_u64(w, "data.fresh", (uint64_t)pos.fresh);
    if (ok && !isnan(t->best) && tr_given(t->options, "best")) {
        snprintf(text, sizeof text, "%.17g", t->best);
        ok = stx_writer_meta(w, "best", text);
    }
    if (ok && t->logged && isfinite(t->sum)) {  /* for the next log record */
        snprintf(text, sizeof text, "%.17g", t->sum);
        ok = stx_writer_meta(w, "log.sum", text);
        ok = ok && stx_writer_meta_u64(w, "log.steps", t->logged);
    }
    ok = ok && stx_model_write(w, t->lm.family, t->lm.model) && stx_optim_save(w, t->optim);
    if (ok && tr_lm_pending(t)) {
        ok = stx_writer_meta_u64(w, "grads.pending", tr_lm_pending(t));
        ok = ok && stx_writer_meta_u64(w, "grads.every", t->opt->update_every);
        ok = ok && stx_writer_add_device(w, "grads", 1, &t->grads_size, t->grads);
    }
    if (ok) return w;
    if (w) stx_writer_free(w);
    return NULL;
}

/* Writes the prefix of the names of a state's tensors, such as "memory.0.". */
TR_DEF const char *tr_lm_prefix(const tr_lm *t, size_t part, char *prefix, size_t size) {
    snprintf(prefix, size, "%s.%zu.", t->kind->states, part);
    return prefix;
}

/* Sends this rank's state to rank 0. Collective. */
TR_DEF int tr_lm_send_state(tr_lm *t, const void *state) {
    stx_ctx *x = t->x;
    const int rank = stx_rank(x);
    stx_writer *w = stx_writer_create(x);
    size_t size = 0;
    uint64_t n;
    void *bytes = NULL;
    int ok;
    if (t->lm.state_save(w, state, "")) bytes = stx_writer_bytes(w, &size);
    else stx_writer_free(w);
    n = size;
    ok = bytes && stx_group_send_bytes(x, &n, sizeof n, rank, 0)
         && stx_group_send_bytes(x, bytes, size, rank, 0);
    stx_block_free(x, bytes);
    return ok;
}

/* Receives the state of rank r and stores it in rank r's rows of `whole`. Collective. */
TR_DEF int tr_lm_receive_state(tr_lm *t, void *whole, int r) {
    stx_ctx *x = t->x;
    const size_t rows = t->in[0]->B;
    uint64_t n = 0;
    void *bytes = NULL, *state;
    stx_file *f = NULL;
    int ok;
    if (stx_group_send_bytes(x, &n, sizeof n, r, 0)) bytes = stx_block(x, (size_t)n);
    state = t->lm.state_create(t->lm.model, rows, 0);
    if (bytes && stx_group_send_bytes(x, bytes, (size_t)n, r, 0))
        f = stx_file_in_memory(x, "another rank's state", bytes, (size_t)n);
    ok = f && state && t->lm.state_load(state, f, "")
         && t->lm.state_copy(whole, (size_t)r * rows, state, 0, rows);
    stx_file_close(f);
    if (state) t->lm.state_free(state);
    stx_block_free(x, bytes);
    return ok;
}

/* Collects the states of all ranks' streams in one state on rank 0. Collective.
   Returns NULL on the other ranks and on error. */
TR_DEF void *tr_lm_gather(tr_lm *t, const void *state) {
    const int ranks = tr_lm_ranks(t), rank = stx_rank(t->x);
    const size_t rows = t->in[0]->B;
    void *whole = NULL;
    int r, ok = 1;
    if (!rank) {
        whole = t->lm.state_create(t->lm.model, rows * (size_t)ranks, 0);
        ok = whole && t->lm.state_copy(whole, 0, state, 0, rows);
    }
    for (r = 1; ok && r < ranks; r++) {
        if (rank == r) ok = tr_lm_send_state(t, state);
        else if (!rank) ok = tr_lm_receive_state(t, whole, r);
    }
    if (ok) return whole;
    if (whole) t->lm.state_free(whole);
    return NULL;
}

/* Adds the state of one part of the batch, with the streams of all ranks, to rank 0's
   writer w. stx_writer_finish reads the state, so it is kept until then. Collective. */
TR_DEF int tr_lm_save_state(tr_lm *t, stx_writer *w, const void *state, const char *prefix) {
    void **list, *whole;
    if (tr_lm_ranks(t) < 2) return t->lm.state_save(w, state, prefix);
    whole = tr_lm_gather(t, state);
    if (stx_rank(t->x)) return stx_ok(t->x);
    if (!whole) return 0;
    list = (void **)realloc(t->gathered, (t->gathered_count + 1) * sizeof *list);
    if (!list) {
        stx_fail(t->x, STX_ERR_MEMORY, "out of memory: cannot save the states of all ranks");
        t->lm.state_free(whole);
        return 0;
    }
    t->gathered = list;
    list[t->gathered_count++] = whole;
    return t->lm.state_save(w, whole, prefix);
}

/* Loads this rank's streams from a state that tr_lm_save_state saved. */
TR_DEF int tr_lm_load_state(tr_lm *t, const stx_file *f, void *state, const char *prefix) {
    size_t rows = t->in[0]->B;
    void *whole;
    int ok;
    if (tr_lm_ranks(t) < 2) return t->lm.state_load(state, f, prefix);
    whole = t->lm.state_create(t->lm.model, rows * (size_t)tr_lm_ranks(t), 0);
    ok = whole && t->lm.state_load(whole, f, prefix)
         && t->lm.state_copy(state, 0, whole, rows * (size_t)stx_rank(t->x), rows);
    if (whole) t->lm.state_free(whole);
    return ok;
}

/* Sets an error and returns 0 if the parameters of the ranks differ, which a defective
   machine or network can cause. Collective. */
TR_DEF int tr_lm_ranks_are_equal(tr_lm *t) {
    const stx_params *p = t->lm.params;
    uint64_t h = TR_HASH_BEGIN;
    double v[2];
    size_t i;
    if (tr_lm_ranks(t) < 2) return 1;
    for (i = 0; i < p->count; i++) {
        size_t n = p->tensor[i]->size;
        stx_real *copy = (stx_real *)malloc(n * sizeof *copy);
        if (!copy) {
            stx_fail(t->x, STX_ERR_MEMORY,
                     "out of memory: cannot compare the parameters of the ranks");
            return 0;
        }
        stx_get(t->x, p->tensor[i], copy);
        h = tr_hash(h, (const char *)copy, n * sizeof *copy);
        free(copy);
    }

    /* the hashes are equal if their maximum equals their minimum */
    v[0] = (double)(h >> 32);
    v[1] = -v[0];
    if (!stx_group_max(t->x, v, 2)) return 0;
    if (v[0] == -v[1]) return 1;
    stx_fail(t->x, STX_ERR_DEVICE, "the parameters of the ranks differ after step %llu: a machine "
             "or the network corrupts data; nothing is saved, and the last checkpoint is intact",
             (unsigned long long)t->step);
    return 0;
}

/* Sends this rank's shard of the optimiser's state to rank 0, which saves it. Called on
   all ranks except rank 0. Does nothing without --shard. Collective. */
TR_DEF int tr_lm_save_optim(const tr_lm *t, const stx_optim *o, const char *prefix) {
    return !t->opt->shard || tr_lm_ranks(t) < 2 || stx_optim_save_as(NULL, o, prefix);
}

/* Replaces the accumulated gradients, which differ between the ranks, by their mean, so
   that it can be saved. Training continues with the mean on every rank. This does not
   change the next update, because averaging is linear: the mean of equal gradients,
   plus what each rank adds later, is the gradient of the whole batch. Collective. */
TR_DEF int tr_lm_average_grads(tr_lm *t) {
    size_t at, i, n;
    stx_real part[1024];
    double sum[1024];
    if (tr_lm_ranks(t) < 2 || !tr_lm_pending(t)) return 1;
    for (at = 0; at < t->grads_size; at += n) {
        n = t->grads_size - at < 1024 ? t->grads_size - at : 1024;
        stx_download(t->x, part, t->grads + at, n);
        for (i = 0; i < n; i++) sum[i] = (double)part[i];
        if (!stx_group_sum(t->x, sum, n)) return 0;
        for (i = 0; i < n; i++) part[i] = (stx_real)(sum[i] / tr_lm_ranks(t));
        stx_upload(t->x, t->grads + at, part, n);
    }
    return stx_ok(t->x);
}

/* Writes the checkpoint to path, completely or not at all. If path is NULL, does
   nothing. Collective; rank 0 writes. */
TR_DEF int tr_lm_save(tr_lm *t, const char *path) {
    stx_writer *w = NULL;
    char prefix[64];
    size_t part;
    int ok;
    if (!path) return 1;
    if (!tr_lm_ranks_are_equal(t) || !tr_lm_average_grads(t)) return 0;
    if (stx_rank(t->x)) {
        ok = tr_lm_save_optim(t, t->optim, "");
    } else {
        w = tr_lm_save_begin(t);
        ok = w != NULL;
    }
    for (part = 0; ok && part < t->groups * t->parts; part++)
        ok = tr_lm_save_state(t, w, t->states[part], tr_lm_prefix(t, part, prefix, sizeof prefix));
    if (ok && t->save_more) ok = t->save_more(t, w);
    if (stx_rank(t->x)) return ok;

    ok = ok && stx_vocab_write(w, t->vocab) && stx_writer_checksum(w);
    if (ok) ok = stx_writer_finish(w, path);
    else stx_writer_free(w);
    while (t->gathered_count) t->lm.state_free(t->gathered[--t->gathered_count]);
    return ok;
}

/* Writes the model, its options and its vocabulary to --export, without the state of
   training. */
TR_DEF int tr_lm_export(tr_lm *t) {
    stx_writer *w = stx_writer_create(t->x);
    stx_writer_meta(w, "format", t->kind->format);
    stx_writer_meta(w, "config", t->config);
    stx_writer_meta(w, "exported", "1");
    stx_writer_meta_u64(w, "step", t->step);
    stx_model_write(w, t->lm.family, t->lm.model);
    stx_vocab_write(w, t->vocab);
    stx_writer_checksum(w);
    return stx_writer_finish(w, t->opt->export_to);     /* writes nothing after an error */
}

/* Checks that the file is a checkpoint of this program and that this run can use it. */
TR_DEF int tr_lm_check_format(tr_lm *t, const stx_file *f, const char *path) {
    const char *format = stx_file_meta(f, "format"), *config = stx_file_meta(f, "config");
    const stx_entry *vocab = stx_file_find(f, "vocab");
    const char *why;
    const int ours = format && !strcmp(format, t->kind->format);
    if (format && !ours && !strncmp(format, "seqtx.", 6) && config && vocab)
        return tr_fail(t->err, TR_ERR, "%.700s is a checkpoint of train_%.*s: use that program",
                       path, (int)strcspn(format + 6, "."), format + 6);
    if (!ours || !config || !vocab || vocab->dtype != STX_U8)
        return tr_fail(t->err, TR_ERR,
                       "%s is a safetensors file, but not a checkpoint that this "
                       "program wrote", path);
    if (!stx_file_verify(f)) return tr_lm_why(t);
    why = stx_file_meta(f, "exported") ? "was written by --export" : NULL;
    if (stx_file_meta(f, "converted.from")) why = "was converted from another program";
    if (why && t->training && !t->opt->init_from)
        return tr_fail(t->err, TR_ERR, "%.400s %s and has no optimiser state, so it cannot be "
                       "resumed: --init-from %.400s starts a new run with its weights", path, why,
                       path);
    return 1;
}

/* Adopts the options in the configuration of a checkpoint. */
TR_DEF int tr_lm_adopt(tr_lm *t, const char *config, const char *path) {
    const char *missing;
    int how = t->training ? TR_RESUME : TR_LOOK;
    if (t->opt->init_from) how = TR_INIT;
    /* the vocabulary changes, so its rule for rare words may change as well */
    if (t->opt->grow_vocab)
        tr_find_option(t->options, "min-count", strlen("min-count"))->keep = TR_FIXED | TR_KEPT;
    if (!tr_options_adopt(t->options, config, how, &t->adopted, t->err, TR_ERR)) return 0;
    if (!t->training || !t->adopted.missing.n) return 1;
    missing = t->adopted.missing.s;
    return tr_fail(t->err, TR_ERR, "%.300s was written by an older version, which did not store "
                   "%.500s: to resume, give %s, or the --preset, that the run started with",
                   path, missing, strchr(missing, ',') ? "those options" : "that option");
}

/* Opens --init-from if it is given, otherwise --checkpoint. Checks the format, and
   adopts the options and the vocabulary. If they require a different context, creates
   one. *f receives the open file, or NULL if there is no checkpoint yet. */
TR_DEF int tr_lm_open_checkpoint(tr_lm *t, stx_file **f) {
    const char *own = t->opt->checkpoint, *from = t->opt->init_from, *path = from ? from : own;
    const stx_entry *vocab;
    struct stat st;
    *f = NULL;
    if (from && own && !stat(own, &st))
        return tr_fail(t->err, TR_ERR, "--init-from %.400s starts a new run, but --checkpoint "
                       "%.400s exists: leave --init-from out to resume it, or name another "
                       "--checkpoint", from, own);
    if (!path || (stat(path, &st) && errno == ENOENT)) {
        if (!from && (t->training || t->opt->dry_run)) return 1;
        if (!from) return tr_lm_no_checkpoint(t);
        if (!strcmp(from, "resume") || !strcmp(from, "scratch"))
            return tr_fail(t->err, TR_ERR, "--init-from %s: there is no file of this name. A run "
                           "resumes if the file of --checkpoint exists, and starts afresh if not; "
                           "--init-from FILE starts with the weights of a file", from);
        return tr_fail(t->err, TR_ERR, "--init-from %s: %s", from, strerror(ENOENT));
    }

    *f = stx_file_open(t->x, path);
    if (!*f) return tr_lm_why(t);
    if (!tr_lm_check_format(t, *f, path)) return 0;
    if (!from) snprintf(t->found_seal, sizeof t->found_seal, "%s", stx_file_meta(*f, "seal"));
    if (!tr_lm_adopt(t, stx_file_meta(*f, "config"), path)) return 0;

    if (!tr_lm_fits_options(t)) {       /* the file belongs to the old context */
        stx_file_close(*f);
        *f = NULL;
        if (!tr_lm_context(t)) return 0;
        *f = stx_file_open(t->x, path);
    }
    vocab = *f ? stx_file_find(*f, "vocab") : NULL;
    t->vocab = vocab ? stx_vocab_load(t->x, vocab->data, vocab->bytes) : NULL;
    return t->vocab ? 1 : tr_lm_why(t);
}

/* Loads gradients that were accumulated when the checkpoint was saved between two
   updates. */
TR_DEF int tr_lm_load_grads(tr_lm *t, const stx_file *f) {
    const stx_entry *e = stx_file_find(f, "grads");
    uint64_t pending = 0, every = 0;
    if (!e && !tr_lm_pending(t)) return 1;
    if (e && !stx_file_meta_u64(t->x, f, "grads.pending", &pending)) return 0;
    if (e && !stx_file_meta_u64(t->x, f, "grads.every", &every)) return 0;
    if (pending != tr_lm_pending(t) || every != t->opt->update_every) {
        stx_fail(t->x, STX_ERR_ARG, "the checkpoint contains the gradients of %llu of %llu steps, "
                 "but --update-every and --update-after require %llu of %llu: give the values that "
                 "the saved run used",
                 (unsigned long long)pending, (unsigned long long)(every ? every : 1),
                 (unsigned long long)tr_lm_pending(t), (unsigned long long)t->opt->update_every);
        return 0;
    }
    if (e->count != t->grads_size) {
        stx_fail(t->x, STX_ERR_FORMAT, "expected %zu gradients, got %zu: the file is damaged",
                 t->grads_size, e->count);
        return 0;
    }
    return stx_entry_upload(e, t->grads, e->count);
}

/* Checks that the checkpoint was written with this seed and training text. */
TR_DEF int tr_lm_check_origin(tr_lm *t, const stx_file *f) {
    const char *data = t->opt->data;
    uint64_t seed, tokens, fingerprint;
    if (!stx_file_meta_u64(t->x, f, "seed", &seed)) return 0;
    if (!stx_file_meta_u64(t->x, f, "data.tokens", &tokens)) return 0;
    if (!stx_file_meta_u64(t->x, f, "data.print", &fingerprint)) return 0;
    if (seed != t->opt->seed) {
        stx_fail(t->x, STX_ERR_FORMAT, "the checkpoint contains two values for --seed, %llu and "
                 "%llu: the file is damaged", (unsigned long long)seed,
                 (unsigned long long)t->opt->seed);
        return 0;
    }
    if (tokens != stx_corpus_size(t->text[0])) {
        stx_fail(t->x, STX_ERR_ARG, "the training text of --data %s: expected %llu tokens, as in "
                 "the checkpoint, got %zu: give the text that the run started with, or another "
                 "--checkpoint for a new run",
                 data, (unsigned long long)tokens, stx_corpus_size(t->text[0]));
        return 0;
    }
    if (fingerprint != t->fingerprint) {
        stx_fail(t->x, STX_ERR_ARG, "the training text of --data %s differs from the text that the "
                 "run started with: give that text, or another --checkpoint for a new run", data);
        return 0;
    }
    return 1;
}

/* Loads the parameters and the step from an open checkpoint and, for training,
   everything else. For --init-from, loads only the parameters. */
TR_DEF int tr_lm_load(tr_lm *t, const stx_file *f) {
    stx_ctx *x = t->x;
    stx_batches_state pos;
    uint64_t tick, fresh;
    size_t part;
    char prefix[64];
    if (!stx_params_load_grown(t->lm.params, f, "", t->grown)) return 0;
    if (t->load_more && !t->load_more(t, f)) return 0;
    if (t->opt->init_from) return 1;
    if (!stx_file_meta_u64(x, f, "step", &t->step)) return 0;
    t->first = t->step;
    if (!tr_lm_meta_real(t, f, "best", &t->best)) return 0;
    t->best_seen = t->best;
    if (!t->training) return 1;

    if (!tr_lm_meta_real(t, f, "log.sum", &t->sum)) return 0;
    if (stx_file_meta(f, "log.sum") && !stx_file_meta_u64(x, f, "log.steps", &t->logged)) return 0;
    if (!tr_lm_load_plan(t, f)) return 0;
    if (!stx_file_meta_u64(x, f, "tick", &tick)) return 0;
    if (!stx_file_meta_u64(x, f, "data.position", &pos.p)) return 0;
    if (!stx_file_meta_u64(x, f, "data.wraps", &pos.wraps)) return 0;
    if (!stx_file_meta_u64(x, f, "data.fresh", &fresh)) return 0;
    pos.fresh = fresh != 0;
    if (!tr_lm_check_origin(t, f)) return 0;

    if (!stx_optim_load(t->optim, f) || !stx_batches_set(t->batches, pos)) return 0;
    if (!tr_lm_load_grads(t, f)) return 0;
    stx_set_step_index(x, tick);
    for (part = 0; part < t->groups * t->parts; part++) {
        tr_lm_prefix(t, part, prefix, sizeof prefix);
        if (!tr_lm_load_state(t, f, t->states[part], prefix)) return 0;
    }
    return 1;
}
