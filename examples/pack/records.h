/* pack/records.h - codes records, sorted by length, in groups: as many records as there
   are lanes begin together, after the prompt, and end at nearly the same time. */
#pragma once
#include "base.h"
#include "lanes.h"
#include "adapt.h"

static void progress(pack *p, size_t done) {
    const time_t now = time(NULL);
    if (!p->terminal || !p->total || (now == p->shown && done < p->total)) return;
    const double seconds = difftime(now, p->began), KB = (double)done / 1000;
    p->shown = now;
    fprintf(stderr, "\r%3.0f %%, %.1f KB/s ", 100 * (double)done / (double)p->total,
            KB / (seconds > 0 ? seconds : 1));
    if (done == p->total) fputc('\n', stderr);
}

/* Every lane reads the prompt. */
static void read_prompt(pack *p) {
    size_t at, len = 1;
    p->m.lm.gen_reset(p->m.gen);
    for (at = 0; at == 0 || at < p->prompt.n; at += len) {
        int32_t id = -1;
        if (p->prompt.n) id = next_token(&p->m, p->prompt.p + at, p->prompt.n - at, &len);
        for (size_t i = 0; i < p->lanes; i++) p->ids[i] = STX_MAX(id, 0);
        feed(&p->m, p->ids);
    }
}

/* The lane's record is coded. */
static void lane_end(pack *p, lane *l) {
    if (!p->unpacking) {
        encode_end(&l->c);
        l->r->to = l->c.to;
    }
    p->done += l->at;
    l->r = NULL;
}

/* Codes the records of all lanes. */
static void code_group(pack *p) {
    const size_t every = STX_MAX(BLOCK / p->lanes, 1);
    size_t active = 0;
    read_prompt(p);
    for (size_t i = 0; i < p->lanes; i++) active += p->team[i].r != NULL;
    for (size_t step = 1; active; step++) {
        size_t part = 0;
        if (p->serial) {
            stx_share all;
            memset(&all, 0, sizeof all);
            all.end = p->lanes;
            code_lanes(&all, p);
        } else stx_parallel(p->m.x, p->lanes, p->lanes * p->m.V * 8, code_lanes, p);
        for (size_t i = 0; i < p->lanes; i++) {
            lane *l = &p->team[i];
            if (!l->r) continue;
            p->ids[i] = l->token;
            if (l->at < l->r->size) part += l->at;
            else {
                lane_end(p, l);
                active--;
            }
        }
        if (p->optim && step % every == 0) adapt(p, every);
        if (active) feed(&p->m, p->ids);
        progress(p, p->done + part);
    }
}

static int longer_first(const void *a, const void *b) {
    const record *const *r = (const record *const *)a, *const *s = (const record *const *)b;
    if ((*r)->size != (*s)->size) return (*r)->size > (*s)->size ? -1 : 1;
    return (*r)->index < (*s)->index ? -1 : 1;
}

/* Codes n records in groups of similar length; only: the index of the only one to unpack,
   or SIZE_MAX. */
static void code_records(pack *p, record *r, size_t n, size_t only) {
    record **order = (record **)memory(NULL, n, sizeof *order);
    size_t longest = 0;
    for (size_t i = 0; i < n; i++) {
        order[i] = &r[i];
        if (only == SIZE_MAX || only == i) p->total += r[i].size;
    }
    qsort(order, n, sizeof *order, longer_first);
    for (size_t i = 0; i < n; i += p->lanes)
        if (i == 0 || p->shared) longest += order[i]->size;
    lanes_create(p, longest);
    if (p->optim) {
        p->state = p->m.lm.state_create(p->m.lm.model, p->lanes, 0);
        check(&p->m);
        p->rate.total = STEPS * (p->total / BLOCK + 1);
    }
    for (size_t first = 0; first < n; first += p->lanes) {
        int any = 0;
        for (size_t i = first; i < n && i < first + p->lanes; i++) {
            if (only != SIZE_MAX && only != order[i]->index) continue;
            lane_begin(p, &p->team[i - first], order[i]);
            any = 1;
        }
        if (any) code_group(p);
    }
    lanes_free(p);
    free(order);
}
