/* pack/lanes.h - what is packed: records, the lanes that code them in lockstep, and the
   state of the whole run.

   A step of a model for one token is mostly the reading of its weights. Each step
   therefore handles one token of each of many lanes. */
#pragma once
#include "base.h"
#include "coder.h"
#include "counts.h"
#include "mix.h"
#include "model.h"

enum { MAX_LANES = 4096 };

typedef struct record {
    size_t size, index;                 /* size in bytes; index: 0 is the first one */
    const unsigned char *from;          /* (from_size): the record, or its packed bytes */
    size_t from_size;
    bytes to;                           /* its packed bytes, or the record */
} record;

/* A lane codes one record after the other. */
typedef struct lane {
    record *r;                          /* NULL: idle */
    size_t at;                          /* bytes of the record that are coded */
    coder c;
    int32_t token;                      /* the last token, which the model reads next */
    place here;                         /* the tokens of the record so far; --adapt and
                                           parts of a file: of all records of this lane */
    table *own;                         /* statistics of these tokens */
    mixing *learned;
} lane;

typedef struct pack {
    model m;
    texts t;
    bytes prompt, dictionary;
    size_t tail, tail_byte;             /* where the end of the dictionary begins that is
                                           packed first: see dictionary.h */
    mixing learned;                     /* the state in which a record begins */
    int unpacking, shared, serial;      /* shared: the lanes have one table; serial: and
                                           learn in order */
    size_t lanes;
    lane *team;                         /* (lanes) */
    int32_t *ids;                       /* (lanes): what the model reads next */
    uint64_t *tree;                     /* (lanes, 2 * 2^depth): see weights */
    stx_optim *optim;                   /* --adapt; otherwise NULL */
    void *state;                        /* of the training steps */
    stx_schedule rate;
    uint64_t updates;
    size_t total, done;                 /* bytes, for the progress */
    int terminal;
    time_t began, shown;
} pack;

/* Makes lanes for texts of `longest` tokens each. */
static void lanes_create(pack *p, size_t longest) {
    texts *t = &p->t;
    if (longest > (UINT32_MAX - t->known) / p->lanes) die("too large");
    t->size = t->known + longest * p->lanes;
    t->token = (int32_t *)memory(t->token, t->size, sizeof *t->token);
    memset(t->token + t->known, 0, longest * p->lanes * sizeof *t->token);
    p->team = (lane *)memory(NULL, p->lanes, sizeof *p->team);
    memset(p->team, 0, p->lanes * sizeof *p->team);
    p->ids = (int32_t *)memory(NULL, p->lanes, sizeof *p->ids);
    p->tree = (uint64_t *)memory(NULL, p->lanes << (t->depth + 1), sizeof *p->tree);
    memset(p->tree, 0, p->lanes * sizeof *p->tree << (t->depth + 1));
    p->m.gen = p->m.lm.gen_create(p->m.lm.model, p->lanes, 0);
    check(&p->m);
    for (size_t i = 0; i < p->lanes; i++) {
        lane *l = &p->team[i];
        const int first = i == 0 || !p->shared;
        l->here.begin = l->here.end = t->known + i * longest;
        l->own = first ? (table *)memory(NULL, 1, sizeof *l->own) : p->team->own;
        if (first) table_create(l->own, p->shared ? longest * p->lanes : longest);
        l->learned = p->serial ? &p->learned : (mixing *)memory(NULL, 1, sizeof *l->learned);
    }
}

static void lanes_free(pack *p) {
    for (size_t i = 0; i < p->lanes; i++) {
        lane *l = &p->team[i];
        if (!p->serial) free(l->learned);
        if (i && p->shared) continue;
        free(l->own->groups);
        free(l->own->after);
        free(l->own);
    }
    free(p->team);
    free(p->ids);
    free(p->tree);
    p->m.lm.gen_free(p->m.gen);
}

static void lane_begin(pack *p, lane *l, record *r) {
    l->r = r;
    l->at = 0;
    coder_begin(&l->c, p->unpacking ? r->from : NULL, r->from_size);
    if (p->shared) return;
    table_begin(l->own);
    if (!p->serial) *l->learned = p->learned;
    l->here.end = l->here.begin;
    l->here.match = l->here.length = 0;
    memset(l->here.context, 0, sizeof l->here.context);
}

/* Codes one token of a lane. */
static void code_token(const pack *p, lane *l, const uint64_t *tree) {
    const model *m = &p->m;
    const unsigned char *s = p->unpacking ? NULL : l->r->from + l->at;
    unsigned char byte = '\n';
    const char *text = (const char *)&byte;
    size_t len = 1, id = m->V;
    if (s) {
        l->token = next_token(m, s, l->r->size - l->at, &len);
        if (l->token >= 0) id = (size_t)l->token;
    }
    id = code_id(&p->t, l->own, &l->here, l->learned, &l->c, tree, id);
    if (id == m->V) {
        byte = p->unpacking ? (unsigned char)decode(&l->c, 256) : *s;
        code_part(&l->c, byte, 1, 256);
    } else if ((int32_t)id != stx_vocab_eos(m->vocab))
        text = stx_vocab_piece(m->vocab, (int32_t)id, &len);
    if (p->unpacking) {
        len = STX_MIN(len, l->r->size - l->at);
        put(&l->r->to, text, len);
    }
    l->at += len;
    l->token = id < m->V ? (int32_t)id : 0;     /* 0: what the model reads after an escape */
    p->t.token[l->here.end] = l->token;
    advance(&p->t, &l->here);
    match_next(&p->t, &l->here, l->own);
}

static void code_lanes(const stx_share *share, const void *job) {
    const pack *p = (const pack *)job;
    for (size_t i = share->begin; i < share->end; i++) {
        uint64_t *tree = p->tree + (i << (p->m.depth + 1));
        if (!p->team[i].r) continue;
        weights(&p->m, p->m.scores + i * p->m.V, tree);
        code_token(p, &p->team[i], tree);
    }
}
