#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/ops.h"
#include "../core/loops.h"
#include "../core/platform.h"
#include "../core/context.h"
#include "../core/arena.h"
#include "../core/tensors.h"
#include "../core/tape.h"
#include "../core/sums.h"


// >>embedding

typedef struct stx__embedding_save {
    const int32_t *ids;     /* (N), on the device */
    size_t N, C;
} stx__embedding_save;

static void stx__embedding_back(stx_ctx *x, stx__node *n) {
    const stx__embedding_save *s = (const stx__embedding_save *)n->save;
    stx_real *dtable = stx__grad(x, n->in[0]);
    if (dtable) STX_RUN(x, stx_embedding_bwd, (x, dtable, n->y->grad, s->ids, s->N, s->C));
}

/* Returns rows ids[0..N) of the table as a tensor of shape dim. The ids are on the
   device, and the caller has checked them. */
static stx_tensor *stx__lookup(stx_ctx *x, stx_tensor *table, const int32_t *ids, size_t N,
                               int ndim, const size_t *dim) {
    stx__embedding_save s;
    stx__node *node;
    stx_tensor *y = stx__tensor(x, STX__STEP_ACTIVATIONS, ndim, dim);
    if (!y) return NULL;
    s.ids = ids;
    s.N = N;
    s.C = dim[ndim - 1];
    STX_RUN(x, stx_embedding_fwd, (x, y->data, table->data, ids, N, s.C));
    node = stx__record1(x, y, stx__embedding_back, table);
    return stx__save(x, node, &s, sizeof s) ? y : NULL;
}

static int stx__ids_fit(stx_ctx *x, const char *op, const int32_t *ids, size_t N, size_t rows,
                        const char *check) {
    size_t i;
    for (i = 0; i < N; i++) {
        if (ids[i] >= 0 && (size_t)ids[i] < rows) continue;
        stx_fail(x, STX_ERR_ARG,
                 "%s: id %ld at position %zu is outside the table of %zu rows: check %s",
                 op, (long)ids[i], i, rows, check);
        return 0;
    }
    return 1;
}

STX_DEF stx_tensor *stx_embedding(stx_ctx *x, stx_tensor *table, const stx_ids *ids) {
    size_t dim[3], N;
    char s[96];
    if (!stx_ok(x) || !table || !ids) return NULL;
    STX__NEED(x, table->ndim == 2, STX_ERR_SHAPE,
              "stx_embedding: table: expected shape (V,C), got %s", stx__shape(table, s));
    N = ids->B * ids->T;
    stx__ids_below(ids, table->dim[0]);
    if (!stx__ids_fit(x, "stx_embedding", ids->data, N, table->dim[0], "the vocabulary size"))
        return NULL;
    dim[0] = ids->B;
    dim[1] = ids->T;
    dim[2] = table->dim[1];
    return stx__lookup(x, table, ids->device, N, 3, dim);
}

STX_DEF stx_tensor *stx_gather(stx_ctx *x, stx_tensor *a, const int32_t *idx, size_t n) {
    size_t dim[2];
    int32_t *copy, *device;
    if (!stx_ok(x) || !a) return NULL;
    STX__NEED(x, idx, STX_ERR_ARG, "stx_gather: idx: expected row indices, got NULL");
    STX__NEED(x, n && n <= SIZE_MAX / sizeof *copy, STX_ERR_ARG,
              "stx_gather: n: expected 1 to SIZE_MAX / 4 row indices, got %zu", n);
    copy = (int32_t *)stx_step_host_bytes(x, n * sizeof *copy);
    if (!copy || !stx__ids_fit(x, "stx_gather", idx, n, stx__rows(a), "idx")) return NULL;
    memcpy(copy, idx, n * sizeof *copy);
    device = stx__ids_device(x, copy, n);
    if (!device) return NULL;
    dim[0] = n;
    dim[1] = stx__last(a);
    return stx__lookup(x, a, device, n, 2, dim);
}

/* The arguments of y (N,C) = rows ids[0..N) of table (V,C). */
typedef struct stx__embedding_job {
    size_t C;
    stx_real *y;
    const stx_real *table;
    const int32_t *ids;
} stx__embedding_job;

static void stx__embedding_part(const stx_share *s, const void *job) {
    const stx__embedding_job *j = (const stx__embedding_job *)job;
    const size_t C = j->C;
    size_t n;
    for (n = s->begin; n < s->end; n++)
        memcpy(j->y + n * C, j->table + (size_t)j->ids[n] * C, C * sizeof *j->y);
}

STX_DEF void stx_embedding_fwd(stx_ctx *x, stx_real *y, const stx_real *table, const int32_t *ids,
                               size_t N, size_t C) {
    stx__embedding_job j;
    j.C = C;
    j.y = y;
    j.table = table;
    j.ids = ids;
    stx_parallel(x, N, N * C, stx__embedding_part, &j);
}

/* The arguments of the loop that adds row n of dy (N,C) to row ids[n] of dtable (V,C),
   for n = 0 .. N-1. */
typedef struct stx__embedding_bwd_job {
    size_t N, C;
    stx_real *dtable;
    const stx_real *dy;
    const int32_t *ids;
} stx__embedding_bwd_job;

/* Ids can repeat, so the work is divided by channels, 16 at a time, and not by rows.
   Each element of dtable is summed by one thread, in the order of the ids. */
STX_INNER void stx__embedding_bwd_loop(int fma, const stx_share *s, const void *job) {
    const stx__embedding_bwd_job *j = (const stx__embedding_bwd_job *)job;
    const size_t c = s->begin * 16, w = STX_MIN(j->C, s->end * 16) - c;
    size_t n;
    for (n = 0; n < j->N; n++)
        stx__axpy_n(fma, j->dtable + (size_t)j->ids[n] * j->C + c, j->dy + n * j->C + c, w, 1, 1);
}

STX_LOOP(stx__embedding_bwd_loop)

STX_DEF void stx_embedding_bwd(stx_ctx *x, stx_real *dtable, const stx_real *dy, const int32_t *ids,
                               size_t N, size_t C) {
    stx__embedding_bwd_job j;
    j.N = N;
    j.C = C;
    j.dtable = dtable;
    j.dy = dy;
    j.ids = ids;
    stx_parallel(x, (C + 15) / 16, N * C, stx__embedding_bwd_loop_run, &j);
}
