/* pack/dictionary.h - --dictionary: a text of the kind whose statistics are further
   inputs of the mixing. It is a part of the model, and of its digest.

   The text is counted in two parts. Its end (the last tenth, at most TAIL bytes),
   which trainers do not train on, shows how much the statistics of the rest are worth:
   it is packed first, in records of the usual size, and what the mixing learns from it
   is the state in which the records begin. Then the end is counted, too. */
#pragma once
#include "base.h"
#include "counts.h"
#include "lanes.h"
#include "records.h"

/* These numbers are part of the format. PIECE: the longest record of the end. */
enum { TAIL = 65536, PIECE = 2048 };

static void dictionary_open(pack *p, const char *path) {
    bytes *const d = &p->dictionary;
    texts *t = &p->t;
    size_t len;
    read_all(d, path);
    p->m.digest = stx_key_add(p->m.digest, digest(d->p, d->n));
    t->token = (int32_t *)memory(NULL, d->n, sizeof *t->token);
    for (size_t at = 0; at < d->n; at += len) {
        if (d->n - at >= STX_MIN(d->n / 10, (size_t)TAIL)) {
            p->tail = t->known;
            p->tail_byte = at;
        }
        const int32_t id = next_token(&p->m, d->p + at, d->n - at, &len);
        t->token[t->known++] = STX_MAX(id, 0);
    }
}

static void count_part(const stx_share *share, const void *job) {
    const texts *t = (const texts *)job;
    for (size_t i = share->begin; i < share->end; i++) {
        place l;
        memset(&l, 0, sizeof l);
        l.begin = l.end = t->counted;
        count(t, &l, t->known, (int)i);
    }
}

/* Counts the dictionary up to t->known. */
static void count_known(stx_ctx *x, texts *t) {
    stx_parallel(x, CONTEXTS, (t->known - t->counted) * 1000, count_part, t);
    for (size_t i = STX_MAX(t->counted, (size_t)LEAST); i < t->known; i++)
        *after(t, &t->phrases, i) = (uint32_t)i;
    t->counted = t->known;
}

/* Learns from the dictionary, before n records are packed or unpacked. */
static void dictionary_read(pack *p, const record *r, size_t n) {
    texts *t = &p->t;
    const size_t known = t->known, lanes = p->lanes, tail = p->dictionary.n - p->tail_byte;
    const int unpacking = p->unpacking;
    size_t piece = 0, k = 0;
    for (size_t i = 0; i < n; i++) piece += STX_MIN(r[i].size, (size_t)PIECE);
    piece = n ? STX_MAX(piece / n, 64) : (size_t)PIECE;
    table_create(&t->phrases, known);
    record *part = (record *)memory(NULL, tail / piece + 1, sizeof *part);
    for (size_t at = p->tail_byte; at < p->dictionary.n; at += piece, k++) {
        memset(&part[k], 0, sizeof *part);
        part[k].index = k;
        part[k].from = p->dictionary.p + at;
        part[k].size = STX_MIN(piece, p->dictionary.n - at);
    }
    int32_t *token = (int32_t *)memory(NULL, known, sizeof *token);
    memcpy(token, t->token, known * sizeof *token);     /* the lanes replace its end */
    t->known = p->tail;
    count_known(p->m.x, t);
    p->lanes = STX_MAX(STX_MIN(k, 32), 1);
    p->unpacking = 0;
    p->serial = 1;
    code_records(p, part, k, SIZE_MAX);
    free(t->token);
    t->token = token;
    t->known = known;
    count_known(p->m.x, t);
    p->lanes = lanes;
    p->unpacking = unpacking;
    p->serial = 0;
    p->total = p->done = 0;
    while (k) free(part[--k].to.p);
    free(part);
}
