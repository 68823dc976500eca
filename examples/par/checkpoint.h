/* par/checkpoint.h - what train_par adds to checkpoints: the gates of a search, their
   optimiser, temperature and text. Also --inherit, which loads the weights of another
   run's checkpoint. */
#pragma once
#include "../train/base.h"
#include "../train/json.h"
#include "../train/options.h"
#include "../train/options_values.h"
#include "../train/options_set.h"
#include "../train/lm.h"
#include "../train/lm_checkpoint.h"
#include "../../seqtx_par.h"
#include "options.h"
#include "run.h"
#include "search.h"


// >>checkpoint

/* Saves the position in the gates' text, and the memory for that text. w is NULL on
   ranks that do not write. */
TR_DEF int save_gate_text(run *r, stx_writer *w) {
    const stx_batches_state pos = stx_batches_get(r->gate_batches);
    char prefix[64];
    size_t part;
    if (w && !(stx_writer_meta_u64(w, "arch.position", pos.p)
               && stx_writer_meta_u64(w, "arch.wraps", pos.wraps)
               && stx_writer_meta_u64(w, "arch.fresh", (uint64_t)pos.fresh)))
        return 0;
    for (part = 0; part < r->t.parts; part++) {
        snprintf(prefix, sizeof prefix, "arch.memory.%zu.", part);
        if (!tr_lm_save_state(&r->t, w, r->gate_state[part], prefix)) return 0;
    }
    return 1;
}

/* Saves the entries that train.h does not save: the optimiser of the gates, the
   temperature and the gates' text. */
TR_DEF int save_more(tr_lm *t, stx_writer *w) {
    run *r = (run *)t;
    char tau[64];
    if (w) {
        if (r->arch && !stx_optim_save_as(w, r->arch, "arch.")) return 0;
        tr_number(tau, r->tau);
        if (!stx_writer_meta(w, "tau", tau)) return 0;
    } else if (r->arch && !tr_lm_save_optim(t, r->arch, "arch.")) {
        return 0;
    }
    return !r->gate_batches || save_gate_text(r, w);
}

TR_DEF int load_gate_text(run *r, const stx_file *f) {
    stx_ctx *x = r->t.x;
    stx_batches_state pos;
    uint64_t fresh;
    char prefix[64];
    size_t part;
    if (!stx_file_meta_u64(x, f, "arch.position", &pos.p)
        || !stx_file_meta_u64(x, f, "arch.wraps", &pos.wraps)
        || !stx_file_meta_u64(x, f, "arch.fresh", &fresh))
        return 0;
    pos.fresh = fresh != 0;
    if (!stx_batches_set(r->gate_batches, pos)) return 0;
    for (part = 0; part < r->t.parts; part++) {
        snprintf(prefix, sizeof prefix, "arch.memory.%zu.", part);
        if (!tr_lm_load_state(&r->t, f, r->gate_state[part], prefix)) return 0;
    }
    return 1;
}

/* Loads the temperature from the checkpoint. Computes it if the checkpoint is too old
   to contain it, or if the command line changes the temperature schedule. */
TR_DEF int load_tau(run *r, const stx_file *f) {
    static const char *const cooling[4] = {"tau-start", "tau-end", "tau-form", "tau-steps"};
    const char *tau = stx_file_meta(f, "tau");
    int i, changed = 0;
    if (tau && (!tr_read_real(tau, &r->tau) || !(r->tau > 0))) {
        stx_fail(r->t.x, STX_ERR_FORMAT, "metadata \"tau\": expected a temperature above 0, got "
                 "'%.40s': the file is damaged", tau);
        return 0;
    }
    for (i = 0; i < 4; i++) changed |= tr_given(&options, cooling[i]);
    if (tau && !changed) {
        stx_par_set_tau(r->model, r->tau);
        return 1;
    }
    if (!stx_file_meta_u64(r->t.x, f, "step", &r->t.step)) return 0;
    cool(r);
    return 1;
}

TR_DEF int load_more(tr_lm *t, const stx_file *f) {
    run *r = (run *)t;
    if (!stx_params_load(r->model->gates, f, "")) return 0;
    if (t->opt->init_from) return 1;
    if (!load_tau(r, f)) return 0;
    if (!t->training) return 1;
    if (r->arch && !stx_optim_load_as(r->arch, f, "arch.")) return 0;
    return !r->gate_batches || load_gate_text(r, f);
}

/* Checks the options that change the meaning of weights but not their shapes. A network
   that inherits weights must have the same values for these options. */
TR_DEF int same_network(tr_lm *t, const stx_file *f) {
    static const char *const names[] = {
        "nheads", "norm-before", "no-final-norm", "norm-eps", "emb-scale",
        "sines", "pos-mode", "full-scale", "attn-relu"
    };
    const char *config = stx_file_meta(f, "config");
    char theirs[64], ours[64];
    size_t i;
    for (i = 0; config && i < sizeof names / sizeof *names; i++) {
        tr_value(tr_find_option(&options, names[i], strlen(names[i])), ours);
        if (tr_json_find(config, names[i], theirs, sizeof theirs) != 1) continue;
        if (strcmp(theirs, ours) != 0)
            return tr_fail(t->err, TR_ERR,
                           "--inherit %.300s: its weights were trained with --%s %s, got %s: use "
                           "the same value", opt.inherit, names[i], theirs, ours);
    }
    return 1;
}

/* Nonzero if the file has the vocabulary of this run. */
TR_DEF int same_vocabulary(const tr_lm *t, const stx_file *f) {
    const stx_entry *e = stx_file_find(f, "vocab");
    const size_t length = stx_vocab_save(t->vocab, NULL, 0);
    void *ours = malloc(length + 1);
    int same = e && ours && stx_vocab_save(t->vocab, ours, length) == length
               && e->bytes == length && !memcmp(e->data, ours, length);
    free(ours);
    return same;
}

/* --inherit: loads the weights of another run's checkpoint. */
TR_DEF int inherit(run *r) {
    tr_lm *t = &r->t;
    struct stat st;
    stx_file *f;
    int ok;
    if (t->rehearsal || !opt.inherit || !*opt.inherit) return 1;
    if (opt.lm.checkpoint && stat(opt.lm.checkpoint, &st) == 0) return 1;
    f = stx_file_open(t->x, opt.inherit);
    if (!f) return tr_fail(t->err, TR_ERR, "--inherit: %s", stx_error(t->x));
    if (!same_vocabulary(t, f)) {
        ok = tr_fail(t->err, TR_ERR,
                     "--inherit %.300s: its vocabulary differs from that of this run: use the same "
                     "--data and --tokens", opt.inherit);
    } else {
        ok = same_network(t, f);
        if (ok && (!stx_file_verify(f) || !stx_params_load(r->model->params, f, "")))
            ok = tr_fail(t->err, TR_ERR, "--inherit %.300s: %s", opt.inherit, stx_error(t->x));
    }
    stx_file_close(f);
    return ok;
}
