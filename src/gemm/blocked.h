#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/ops.h"
#include "../core/loops.h"
#include "../core/platform.h"
#include "../core/context.h"
#include "micro.h"


// >>gemm: packing and blocks

static size_t stx__round_up(size_t n, size_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

/* Divides n into the smallest number of equal blocks of at most `most`. Returns the
   block size, rounded up to a multiple of `multiple`. The result is at least
   `multiple`. */
static size_t stx__equal_blocks(size_t n, size_t most, size_t multiple) {
    size_t blocks = (n + most - 1) / most;
    size_t size = stx__round_up(blocks ? (n + blocks - 1) / blocks : 1, multiple);
    return size <= most ? size : STX_MAX(most / multiple * multiple, multiple);
}

static size_t stx__unit_elements(const stx__micro *mk) {
    return mk->kr > 1 ? 2 : 1;
}

/* Returns the number of k values per block: a multiple of KR and of 16 (the number of
   floats in a cache line), at most 448 in f32 and 1024 in bf16. These limits gave the
   best speed in measurements. Because of the rounding, the result can exceed K. */
static size_t stx__block_k(const stx__micro *mk, size_t K) {
    return stx__equal_blocks(K, stx__unit_elements(mk) == 2 ? 2 * STX__KC : 7 * STX__KC / 8,
                             STX_MAX((size_t)16, mk->kr));
}

/* Returns the number of columns in a block: as many whole strips as fit in a thread's
   scratch memory. With fewer than KC steps, a block can have more than NC columns. */
static size_t stx__block_n(const stx__micro *mk, size_t N, size_t K) {
    size_t steps = stx__round_up(STX_MIN(K, stx__block_k(mk, K)), mk->kr) / stx__unit_elements(mk);
    return stx__equal_blocks(N, STX__NC * STX__KC / steps, mk->nr);
}

/* Packing reads short parts of rows that are far apart, so it prefetches this many rows
   ahead. */
enum { STX__PACK_AHEAD = 8 };

/* Transposes one strip of B for op(B) = B^T: B (n,k), with n <= NR, becomes (k,NR),
   padded with zeros. Moves whole units: in bf16, k counts units and B consists of
   units. */
static void stx__transpose(stx_real *to, size_t nr, const stx_real *B, size_t ldb, size_t n,
                           size_t k) {
    size_t p, j;
    if (n < nr) memset(to, 0, nr * k * sizeof *to);
    /* uses memcpy, because a unit can consist of two bf16 elements */
    for (j = 0; j < n; j++)
        for (p = 0; p < k; p++) memcpy(to + p * nr + j, B + j * ldb + p, sizeof *to);
}

static void stx__transpose_for(const stx__micro *mk, stx_real *to, const stx_real *B, size_t ldb,
                               size_t n, size_t k) {
    if (mk->transpose)
        mk->transpose(to, B, ldb, n, k);
    else
        stx__transpose(to, mk->nr, B, ldb, n, k);
}

/* Packs op(B) = B (k,n) into strips (k/u,NR) of units, where u is the number of
   elements per unit. The strips are `stride` units apart. The caller adds the padding. */
static void stx__pack_strips(const stx__micro *mk, stx_real *to, size_t stride, const stx_real *B,
                             size_t ldb, size_t k, size_t n) {
    const size_t nr = mk->nr, u = stx__unit_elements(mk);
    size_t p, j;
    for (p = 0; p < k; p += u)
        for (j = 0; j < n; j += nr) {
            stx_real *t = to + j / nr * stride + p / u * nr;
            const stx_real *b = B + p * ldb + j;
            size_t w = STX_MIN(nr, n - j);
            if (u == 1)
                memcpy(t, b, w * sizeof *t);
            else
                mk->pair((uint32_t *)(void *)t, b, p + 1 < k ? b + ldb : NULL, w);
        }
}

enum { STX__TRANSPOSE_PIECE = 128 };    /* columns of B per pass of stx__pack_bt_bf16 */

/* Packs one strip of op(B) = B^T in bf16, with B (n,k) and n <= NR. Rounds the rows, in
   which the two elements of a unit are already adjacent, and then transposes the
   units. */
static void stx__pack_bt_bf16(const stx__micro *mk, stx_real *to, const stx_real *B, size_t ldb,
                              size_t k, size_t n) {
    uint32_t units[(size_t)STX__NR_MAX * STX__TRANSPOSE_PIECE / 2];
    uint16_t *rows = (uint16_t *)(void *)units;
    size_t p, r;
    for (p = 0; p < k; p += STX__TRANSPOSE_PIECE) {
        size_t kc = STX_MIN((size_t)STX__TRANSPOSE_PIECE, k - p);
        size_t padded = stx__round_up(kc, mk->kr);
        for (r = 0; r < n; r++) {
            uint16_t *row = rows + r * STX__TRANSPOSE_PIECE;
            mk->to_bf16(row, B + r * ldb + p, kc);
            memset(row + kc, 0, (padded - kc) * sizeof *row);
        }
        stx__transpose_for(mk, to + p / 2 * mk->nr, (const stx_real *)(const void *)units,
                           STX__TRANSPOSE_PIECE / 2, n, padded / 2);
    }
}

/* Packs op(B) (k,n) into strips of NR columns, each with (k/u,NR) units of u elements.
   The strips are `stride` units apart. Pads the columns with zeros to a multiple of NR,
   and k to a multiple of KR. */
static void stx__pack_b(const stx__micro *mk, stx_real *to, size_t stride, const stx_real *B,
                        size_t ldb, int tb, size_t k, size_t n) {
    const size_t nr = mk->nr, u = stx__unit_elements(mk), padded = stx__round_up(k, mk->kr);
    size_t j;
    if (!tb) {
        /* stx__pack_strips does not pad; mk->pack_strips pads columns to NR and k to a
           whole unit. Strips that need other padding are zeroed first */
        const int pads = mk->pack_strips != NULL;
        const size_t done = pads ? stx__round_up(k, u) : k;
        for (j = 0; j < n; j += nr)
            if (done < padded || (!pads && n - j < nr))
                memset(to + j / nr * stride, 0, nr * padded / u * sizeof *to);
        if (pads)
            mk->pack_strips(to, stride, B, ldb, k, n);
        else
            stx__pack_strips(mk, to, stride, B, ldb, k, n);
        return;
    }
    for (j = 0; j < n; j += nr, to += stride) {
        size_t w = STX_MIN(nr, n - j);
        if (u == 1)
            stx__transpose_for(mk, to, B + j * ldb, ldb, w, k);
        else
            stx__pack_bt_bf16(mk, to, B + j * ldb, ldb, k, w);
    }
}

/* A block of op(A) in the form in which the micro-kernel reads it. */
typedef struct stx__a_block {
    const char *data;
    size_t row_bytes;   /* row i begins at data + i row_bytes if i is a multiple of MR */
    size_t rs, ks;
} stx__a_block;

/* Packs op(A) = A^T in f32, with A (k,m), into strips (k,MR). The missing rows of the
   last strip are not written, because no f32 micro-kernel reads them. */
static void stx__pack_at(const stx__micro *mk, stx_real *to, const stx_real *A, size_t lda,
                         size_t m, size_t k) {
    size_t i0, i, p;
    if (mk->pack_at) {
        mk->pack_at(to, A, lda, m, k);
        return;
    }
    for (i0 = 0; i0 < m; i0 += mk->mr, to += mk->mr * k) {
        size_t n = STX_MIN(mk->mr, m - i0);
        for (p = 0; p < k; p++)
            for (i = 0; i < n; i++) to[p * mk->mr + i] = A[p * lda + i0 + i];
    }
}

/* Packs op(A) in f32. A^T is packed into strips. A is used in place or, if `copy` is
   set, copied to contiguous rows. */
static stx__a_block stx__pack_a_f32(const stx__micro *mk, stx_real *to, const stx_real *A,
                                    size_t lda, int ta, size_t m, size_t k, int copy) {
    const size_t row = ta || copy ? k : lda;
    stx__a_block a;
    size_t i;
    a.data = (const char *)(ta || copy ? to : A);
    a.row_bytes = row * sizeof *to;
    a.rs = ta ? 1 : row;
    a.ks = ta ? mk->mr : 1;
    if (ta) {
        stx__pack_at(mk, to, A, lda, m, k);
        return a;
    }
    if (!copy) return a;
    for (i = 0; i < m; i++) {
        if (i + STX__PACK_AHEAD < m) stx_prefetch(A + (i + STX__PACK_AHEAD) * lda, k);
        memcpy(to + i * k, A + i * lda, k * sizeof *to);
    }
    return a;
}

/* Packs op(A) = A in bf16 as rounded rows (m,k), with k padded to a multiple of KR. AMX
   also reads rows after the last one; their contents do not matter. */
static stx__a_block stx__pack_a_bf16(const stx__micro *mk, stx_real *to, const stx_real *A,
                                     size_t lda, size_t m, size_t k) {
    const size_t padded = stx__round_up(k, mk->kr);
    stx__a_block a;
    size_t i;
    a.data = (const char *)to;
    a.row_bytes = padded * sizeof(uint16_t);
    a.rs = padded;
    a.ks = 2;
    for (i = 0; i < m; i++) {
        uint16_t *row = (uint16_t *)(void *)to + i * padded;
        mk->to_bf16(row, A + i * lda, k);
        memset(row + k, 0, (padded - k) * sizeof *row);
    }
    return a;
}

/* Packs op(A) = A^T in bf16, with A (k,m). Two rows of A become one row of units of the
   result (k/2,m). */
static stx__a_block stx__pack_at_bf16(const stx__micro *mk, stx_real *to, const stx_real *A,
                                      size_t lda, size_t m, size_t k) {
    uint32_t *units = (uint32_t *)(void *)to;
    stx__a_block a;
    size_t p;
    a.data = (const char *)to;
    a.row_bytes = sizeof *units;
    a.rs = 2;
    a.ks = 2 * m;
    for (p = 0; p < k; p += 2, units += m) {
        const stx_real *r0 = A + p * lda;
        if (p + 1 + STX__PACK_AHEAD < k) {
            stx_prefetch(r0 + STX__PACK_AHEAD * lda, m);
            stx_prefetch(r0 + (STX__PACK_AHEAD + 1) * lda, m);
        }
        mk->pair(units, r0, p + 1 < k ? r0 + lda : NULL, m);
    }
    return a;
}

/* Packs op(A) = A^T in bf16 with KR = 32 (AMX), with A (k,m), into [m/32][k/32] pieces of
   op(A), each with 32 rows of 16 units. Half a piece fills a tile register. Packs each
   piece as 16 rows of 32 units and then transposes it. Missing rows are not written; see
   stx__pack_a_bf16. */
static stx__a_block stx__pack_at_tiles(const stx__micro *mk, stx_real *to, const stx_real *A,
                                       size_t lda, size_t m, size_t k) {
    const size_t padded = stx__round_up(k, 32);
    uint32_t t[16 * 32], *tile = (uint32_t *)(void *)to;
    stx__a_block a;
    size_t i, p, q, r;
    a.data = (const char *)to;
    a.row_bytes = padded * sizeof(uint16_t);
    a.rs = 32;
    a.ks = 64; /* 16 steps span a piece of 1024 elements */
    if (mk->pack_at) {
        mk->pack_at(to, A, lda, m, k);
        return a;
    }
    for (i = 0; i < m; i += 32)
        for (p = 0; p < padded; p += 32, tile += 16 * 32) {
            const size_t n = STX_MIN((size_t)32, m - i);
            for (q = 0; q < 16; q++) {
                const size_t row = p + 2 * q;
                const stx_real *r0 = A + row * lda + i;
                if (row < k)
                    mk->pair(t + q * 32, r0, row + 1 < k ? r0 + lda : NULL, n);
                else
                    memset(t + q * 32, 0, 32 * sizeof *t);
            }
            for (r = 0; r < n; r++)
                for (q = 0; q < 16; q++) tile[r * 16 + q] = t[q * 32 + r];
        }
    return a;
}

/* Packs op(A) (m,k) at `to`, unless the micro-kernel can read op(A) in place. If `copy`
   is set, always copies op(A). */
static stx__a_block stx__pack_a(const stx__micro *mk, stx_real *to, const stx_real *A, size_t lda,
                                int ta, size_t m, size_t k, int copy) {
    if (mk->kr == 1) return stx__pack_a_f32(mk, to, A, lda, ta, m, k, copy);
    if (!ta) return stx__pack_a_bf16(mk, to, A, lda, m, k);
    if (mk->kr == 2) return stx__pack_at_bf16(mk, to, A, lda, m, k);
    return stx__pack_at_tiles(mk, to, A, lda, m, k);
}

/* A block of C whose values are final. The epilogue, such as the bias and activation of
   >>linear, is applied to the block while it is in the cache. */
typedef struct stx__c_block {
    stx_real *C;                /* (rows,cols), row stride ldc */
    size_t rows, cols, ldc;
    size_t offset, col;         /* element index and column of C[0][0] in the whole matrix */
} stx__c_block;

typedef struct stx__epilogue {
    void (*run)(stx_ctx *x, const void *arg, const stx__c_block *block);
    const void *arg;
} stx__epilogue;

/* The part of a matmul that one thread computes at a time. */
typedef struct stx__gemm_part {
    stx_ctx *x;
    const stx__micro *mk;
    stx_real *scratch;              /* STX__SCRATCH elements of this thread */
    stx_gemm_args g;                /* one matmul, with a batch of 1 */
    const stx_real *shared_b;       /* path SHARED_B: the packed op(B) of g, which is not
                                       divided into blocks; other paths: NULL */
    const stx__epilogue *epilogue;  /* NULL if there is none */
    size_t offset, col;             /* element index and column of g.C in the whole C */
} stx__gemm_part;

/* Runs the epilogue on `rows` rows from row i and `cols` columns from column j of the
   part. */
static void stx__part_epilogue(const stx__gemm_part *p, size_t i, size_t j, size_t rows,
                               size_t cols) {
    stx__c_block block;
    if (!p->epilogue) return;
    block.C = p->g.C + i * p->g.ldc + j;
    block.rows = rows;
    block.cols = cols;
    block.ldc = p->g.ldc;
    block.offset = p->offset + i * p->g.ldc + j;
    block.col = p->col + j;
    p->epilogue->run(p->x, p->epilogue->arg, &block);
}

/* C = beta C. If beta is 0, C is cleared even where it contains NaN. */
STX_INNER void stx__gemm_scale_c(const stx_gemm_args *g) {
    size_t i, j;
    for (i = 0; i < g->M; i++) {
        stx_real *c = g->C + i * g->ldc;
        if (g->beta == 0)
            memset(c, 0, g->N * sizeof *c);
        else if (g->beta != 1)
            for (j = 0; j < g->N; j++) c[j] *= g->beta;
    }
}

/* Number of units (columns times steps) in a group of strips of op(B): 540 KB, about
   half of a 1 MB L2 cache. */
enum { STX__GROUP_B = (540 << 10) / 4 };

/* Rows of A whose distance is a multiple of this many elements (4 KB) map to the same
   set of L1, which has 64 sets of 64-byte lines. An AVX-512 tile has 14 rows, more than
   the 8 or 12 ways of a set, so such rows are copied. For simplicity, they are copied
   for every micro-kernel. */
enum { STX__L1_ALIAS = 4096 / sizeof(stx_real) };

/* A blocked matmul and its current block. */
typedef struct stx__blocked {
    const stx__micro *mk;
    const stx_gemm_args *g;
    const stx_real *packed_b;       /* the packed op(B) of the current block */
    int copy_a;                     /* 1: A is copied, because its rows collide in L1 */
    int scale_tile;                 /* 1: tiles are multiplied by alpha, because op(B) is
                                       in bf16 */
    size_t mc_max, nc_max, kc_max, group; /* the largest mc, nc and kc; columns of op(B)
                                             per group of strips */

    size_t jc, nc;              /* columns of C: jc .. jc + nc - 1 */
    size_t pc, kc, steps;       /* summation indices pc .. pc + kc - 1 */
    size_t ic, mc;              /* rows of C: ic .. ic + mc - 1 */
    stx__a_block a;
} stx__blocked;

static void stx__blocked_init(stx__blocked *w, const stx__gemm_part *p) {
    const stx_gemm_args *g = &p->g;
    const stx__micro *mk = p->mk;
    const size_t u = stx__unit_elements(mk);
    size_t steps;
    memset(w, 0, sizeof *w);
    w->mk = mk;
    w->g = g;
    w->copy_a = !g->ta && mk->kr == 1 && g->lda % STX__L1_ALIAS == 0;
    w->scale_tile = u == 2 && g->alpha != 1;
    w->kc_max = stx__block_k(mk, g->K);
    w->nc_max = stx__block_n(mk, g->N, g->K);
    w->mc_max = stx__equal_blocks(g->M, STX__MC, mk->mr);

    /* NR > 16: the tiles of a strip of op(A) are computed from left to right, for a
       group of strips of op(B). NR <= 16: a group is one strip of op(B), which stays in
       L1, and its tiles are computed from top to bottom */
    steps = stx__round_up(STX_MIN(g->K, w->kc_max), mk->kr) / u;
    w->group = mk->nr;
    if (mk->nr > 16) w->group = STX_MAX(STX__GROUP_B / steps / mk->nr * mk->nr, mk->nr);

    /* with only one group, each strip of op(A) is used in one pass over op(B), so MR
       rows are copied at a time, and the copy stays in L1 */
    if (w->copy_a && STX_MIN(g->N, w->nc_max) <= w->group) w->mc_max = mk->mr;
}

/* Packs op(B) for the current block. */
static void stx__blocked_pack_b(const stx__blocked *w, stx_real *to) {
    const stx_gemm_args *g = w->g;
    const stx_real *b = g->B + (g->tb ? w->jc * g->ldb + w->pc : w->pc * g->ldb + w->jc);
    size_t i, n = stx__round_up(w->nc, w->mk->nr) * w->kc;
    stx__pack_b(w->mk, to, w->mk->nr * w->steps, b, g->ldb, g->tb, w->kc, w->nc);
    if (g->alpha == 1 || w->scale_tile) return;
    for (i = 0; i < n; i++) to[i] *= g->alpha;
}

/* Computes the tile that begins at row ir and column jr of the current block. The
   micro-kernel always computes NR columns. It writes them directly to C, unless the tile
   is narrower or must be multiplied by alpha. */
static void stx__blocked_tile(const stx__blocked *w, size_t ir, size_t jr) {
    const stx__micro *mk = w->mk;
    const size_t ldc = w->g->ldc, nr = mk->nr;
    const size_t rows = STX_MIN(mk->mr, w->mc - ir), cols = STX_MIN(nr, w->nc - jr);
    const int add = w->pc || w->g->beta != 0;
    const char *a = w->a.data + ir * w->a.row_bytes;
    const stx_real *b = w->packed_b + jr * w->steps;
    stx_real *c = w->g->C + (w->ic + ir) * ldc + w->jc + jr;
    stx_real tile[STX__MR_MAX * STX__NR_MAX];
    size_t i, j;
    if (cols == nr && !w->scale_tile) {
        mk->run(rows, w->steps, a, w->a.rs, w->a.ks, b, nr, c, ldc, add);
        return;
    }
    mk->run(rows, w->steps, a, w->a.rs, w->a.ks, b, nr, tile, nr, 0);
    if (w->scale_tile)
        for (i = 0; i < rows * nr; i++) tile[i] *= w->g->alpha;
    for (i = 0; i < rows; i++)
        for (j = 0; j < cols; j++)
            c[i * ldc + j] = add ? c[i * ldc + j] + tile[i * nr + j] : tile[i * nr + j];
}

/* Computes all tiles of the current block. */
static void stx__blocked_tiles(const stx__blocked *w) {
    size_t jg, ir, jr;
    for (jg = 0; jg < w->nc; jg += w->group)
        for (ir = 0; ir < w->mc; ir += w->mk->mr)
            for (jr = jg; jr < STX_MIN(w->nc, jg + w->group); jr += w->mk->nr)
                stx__blocked_tile(w, ir, jr);
}

/* Computes one part by the loops that the start of the section explains. */
static void stx__gemm_blocked(const stx__gemm_part *p) {
    const stx_gemm_args *g = &p->g;
    stx_real *packed_a = p->scratch, *packed_b = p->scratch + STX__MC * STX__KC;
    stx__blocked w;
    stx__blocked_init(&w, p);
    w.packed_b = p->shared_b ? p->shared_b : packed_b;
    if (g->beta != 0) stx__gemm_scale_c(g);

    for (w.jc = 0; w.jc < g->N; w.jc += w.nc) {
        w.nc = STX_MIN(w.nc_max, g->N - w.jc);
        for (w.pc = 0; w.pc < g->K; w.pc += w.kc) {
            w.kc = STX_MIN(w.kc_max, g->K - w.pc);
            w.steps = stx__round_up(w.kc, w.mk->kr) / stx__unit_elements(w.mk);
            if (!p->shared_b) stx__blocked_pack_b(&w, packed_b);

            for (w.ic = 0; w.ic < g->M; w.ic += w.mc) {
                w.mc = STX_MIN(w.mc_max, g->M - w.ic);
                w.a = stx__pack_a(w.mk, packed_a,
                                  g->A + (g->ta ? w.pc * g->lda + w.ic : w.ic * g->lda + w.pc),
                                  g->lda, g->ta, w.mc, w.kc, w.copy_a);
                stx__blocked_tiles(&w);
                if (w.pc + w.kc == g->K) stx__part_epilogue(p, w.ic, w.jc, w.mc, w.nc);
            }
        }
    }
}
