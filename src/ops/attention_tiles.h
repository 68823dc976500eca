#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/attention.h"
#include "../core/loops.h"
#include "../core/platform.h"
#include "../gemm/micro.h"
#include "../gemm/blocked.h"
#include "attention.h"


// >>attention: tiles

/* How the kernels compute attention.

   Some terms differ from those in >>gemm. A tile is up to BQ queries (its rows) by up
   to BK keys (its columns). A strip is MR rows or NR columns, as one run of the
   micro-kernel processes them. An operand (n,ld) is a left input of the micro-kernel,
   with a row stride of ld. A word is what >>gemm calls a unit (one stx_real, or two
   bf16), and a unit is a piece of work.

   In the forward pass, a work unit consists of a few tiles of up to BQ queries of one
   head of one batch row. (In the backward pass, it consists of all queries of a head
   and a range of its keys; see stx__attn_unit.) The unit processes the keys in tiles of
   up to BK, from the oldest key that the head reaches to the newest key that the unit's
   last query sees. This range is rounded outwards to multiples of KEY_ALIGN, and other
   keys are not read. Each tile of keys is packed once and then used by all query tiles
   of the unit.

   Example: x marks the keys that T = 4 queries see with S = 11, delta_min = 1 and
   distances up to 6. All keys are in one tile with j0 = 0, so column numbers are key
   numbers:

       key       0  1  2  3  4  5  6  7  8  9 10
       query 0   .  x  x  x  x  x  x  .  .  .  .      lo = 1, hi = 7
       query 1   .  .  x  x  x  x  x  x  .  .  .      lo = 2, hi = 8
       query 2   .  .  .  x  x  x  x  x  x  .  .
       query 3   .  .  .  .  x  x  x  x  x  x  .

   For a tile of queries (rows r) and a tile of keys (columns c), with the packed
   queries q = scale (q + content_bias) and qv = scale (q + position_bias), and with p0,
   the row of pe for the distance between row 0 and column 0:

       s[r][c]  = q_r . k_c                              GEMM
       s[r][c] += qv_r . pe_p,  p = p0 + c - r           GEMM, skewed
       max'     = max(max, max_c s[r][c])                running softmax
       w[r][c]  = m e^(s[r][c] - max'),  f = e^(max - max')
       sum_r    = f sum_r + sum_c w[r][c]
       all_r    = f all_r + sum_c e^(s[r][c] - max')
       w[r][c] *= factor                                 dropout; sqrt(N)
       y_r      = f y_r + sum_c w[r][c] v_c              GEMM

   The persistent vectors follow as further tiles, without the second GEMM and with
   m = 1; only they have the factor sqrt(N). In the end, y_r is divided by sum_r +
   eps all_r or, with no_renorm, by all_r. In the forward pass, q, k, s, v and y of a
   unit fit in an L2 cache of 1 MB: with D = 64, they take 0.7 MB in f32, and qv takes
   another 0.13 MB.

   The micro-kernel computes MR rows and NR columns at a time and skips columns that
   none of the MR rows sees. A row sees columns [lo,hi); its weights in other columns
   are set to zero. Here, unlike in the definition, a query also sees the keys with
   m = 0 up to distance `farthest`.

   The skew. The second GEMM yields E[r][p] = qv_r . pe_p, which belongs in column
   c = p - p0 + r of s, so row r of E must move r columns to the right. This costs
   nothing, because the GEMM writes to s + (p - p0) with a row stride of LDS + 1 instead
   of LDS.

       E                            s
           p0  +1  +2                   c  0   1   2   3   4
       r 0  a   b   c               r 0    a   b   c
       r 1  d   e   f      ->       r 1        d   e   f
       r 2  g   h   i               r 2            g   h   i

   In the backward pass, the gradient of E is ds read with a row stride of LDS + 1.
   Elements outside the tile are written to the PAD columns between the rows.

   Easy to get wrong
       - The running maximum must skip keys with m = 0, unless they are part of the
         normaliser: their scores can exceed all others.
       - A row can see no key at all (y = 0), or none in one tile.
       - A padded key must not be used anywhere: its value can be NaN. A NaN in the value
         of any other key can reach queries that do not see it, through weights of 0.
       - With eps > 0 or no_renorm, all keys within span contribute to the normaliser,
         including those with m = 0.
       - dspan_fraction includes both ends of the ramp: 0 <= m <= 1 before clamping. */
enum {
    STX__BQ    = 128,                /* queries per tile */
    STX__BK    = 384,                /* keys per tile */
    STX__GROUP = 4 * STX__BQ,        /* maximum number of queries of a forward unit */

    /* Tiles of keys begin and end at multiples of KEY_ALIGN, which is a multiple of NR
       and KR. */
    STX__KEY_ALIGN = 32,

    /* The margin between the rows of a tile. Must be at least MR + NR - 2, the most by
       which a skewed strip can exceed the tile on either side. */
    STX__PAD = 96,
    STX__LDS = STX__BK + STX__PAD,   /* row stride of a tile */

    /* Added to the row strides of transposed matrices. Without it, these would often be
       multiples of large powers of 2, and a column would occupy few cache sets. */
    STX__STAGGER = 16,
    STX__LDK = STX__BK + STX__STAGGER    /* row stride of dk_t and dv_t */
};

/* Computes a distance e such that m is 0 at every distance delta > e, for span_fraction
   = z. This is true for e = ceil(z max_span) + ceil(ramp), because then (z max_span + 1
   - delta) / ramp <= -1, and m is this plus 1, clamped to at least 0. e is increased by
   1 part in 2^22 to allow for the rounding errors of the kernels: integers above 2^24
   are rounded by at most 1 part in 2^24, and the rest covers the few other rounding
   errors in m. */
STX_DEF size_t stx_attention_reach(double z, double max_span, double ramp, size_t most) {
    STX__FP_SCOPE;
    double e = ceil(z * max_span) + ceil(ramp);
    if (!stx__finite(e)) return e > 0 ? most : 0;
    if (!(e > 0)) return 0;
    e += floor(e / 4194304); /* 2^22 */
    if (e > (double)most) e = (double)most;
    STX__FP_PIN(e);
    return e < (double)most ? (size_t)e : most;
}

/* Returns nonzero if the normaliser includes all keys within span, even those with
   m = 0. */
static int stx__attn_norm_has_masked(const stx_attention_args *a) {
    return a->eps > 0 || a->no_renorm;
}

/* Returns the largest distance that the loops visit for head h. This is one more than
   stx_attention_reach, because the first key with m = 0 also contributes to
   dspan_fraction. */
static size_t stx__attn_farthest(const stx_attention_args *a, size_t h) {
    size_t e;
    if (!a->span_fraction || stx__attn_norm_has_masked(a)) return a->span;
    e = stx_attention_reach((double)stx__attn_span_fraction(a, h), (double)a->max_span,
                            (double)a->ramp, a->span);
    return e < a->span ? e + 1 : a->span;
}

/* State shared by all tiles of a call. MR, NR and KR are mk->mr, mk->nr and mk->kr. */
typedef struct stx__attn {
    const stx_attention_args *a;
    const stx_ctx *x;
    const stx__micro *mk;
    size_t    per_word;          /* elements per word: 1, or 2 for bf16 */
    size_t    Dk, Dp;            /* Dk: D rounded up to a multiple of KR; Dp: D rounded up
                                    to a multiple of NR */
    size_t    order[STX__MAX_HEADS];    /* heads, sorted by `farthest`, largest first */
    size_t    farthest[STX__MAX_HEADS]; /* [i]: stx__attn_farthest for head order[i] */
    size_t    tables;            /* number of pe tables: 0, 1 (for all heads) or H */
    ptrdiff_t pe_first;          /* first packed row of pe: a multiple of NR_MAX, so that
                                    the strips of pe do not depend on the spans */
    size_t    pe_rows;           /* number of packed rows: those that any head reaches,
                                    rounded up */
    stx_real *pe_columns;        /* for qv . pe: (tables,pe_rows/NR,Dk/per_word,NR) */
    stx_real *pe_packed_rows;    /* for sum ds pe: (tables,Dp/NR,pe_rows/per_word,NR) */
    int       separate_qv;       /* nonzero if q and qv differ because of a bias */
} stx__attn;

/* Buffers of one thread. n is the largest number of queries of any unit (max_queries of
   stx__attn_work), and ldt is n rounded up, plus padding. In bf16, the elements of an
   operand have 2 bytes. */
typedef struct stx__attn_scratch {
    void     *q, *qv;            /* operands (n,Dk). q: scale (q + content_bias). qv:
                                    scale (q + position_bias). They share a buffer if
                                    there are no biases */
    void     *dy;                /* operand (n,Dk): dy; backward only */
    void     *q_t, *qv_t, *dy_t; /* operands (D,ldt): q, qv, dy transposed; backward only */
    stx_real *stage;             /* (BQ,D): queries before they are packed */
    stx_real *gather;            /* (BK,D): rows of a tile that are not contiguous; used
                                    only with cached rows */
    stx_real *out, *out_pe;      /* (n,Dp). Forward: `out` is y. Backward: `out` is
                                    sum ds k, and out_pe is sum ds pe */
    stx_real *s, *g;             /* (BQ,LDS) with margins. s: scores, then weights; also a
                                    buffer (BK,NR) for transposes. g: dy . v, then ds */
    void     *half;              /* bf16: (BQ,LDS) operand with margins; weights or ds */
    uint32_t *s_pairs, *g_pairs; /* bf16, backward: (BQ/2,LDS) pairs of rows of s and g */
    uint32_t *skewed_pairs;      /* bf16, backward: pairs of rows of g, skewed */
    stx_real *k_columns;         /* words (BK/NR,Dk/per_word,NR): keys, packed as columns */
    stx_real *v_columns;         /* like k_columns, but for values; backward only */
    stx_real *rows;              /* words (Dp/NR,BK/per_word,NR): values (forward) or keys
                                    (backward), packed as rows */
    stx_real *dk_t, *dv_t;       /* (D,LDK): gradients of the keys and values of the tile */
    stx_real *state;             /* forward (n,3): max, sum m e^(s - max), sum
                                    e^(s - max); backward (n): dy . y */
    stx_real *m_by_distance;     /* buffer for stx__attn_mask.m_by_distance */
    stx_real *factors;           /* (BK): buffer of stx__attn_weight_factors */
} stx__attn_scratch;

/* The span mask m of one head as a function of distance, starting at the farthest
   distance. */
typedef struct stx__attn_mask {
    size_t    farthest;          /* result of stx__attn_farthest */
    stx_real *m_by_distance;     /* (count): entry n is m at distance farthest - n. Nearer
                                    keys have m = 1 */
    size_t    count;
    size_t    zeros;             /* entries n < zeros are 0 */
    size_t    begin, end;        /* entries n in [begin,end) have 0 <= m <= 1 before
                                    clamping; `end` is count + 1 if m is exactly 1 at n =
                                    count */
} stx__attn_mask;

typedef struct stx__attn_tile {
    const stx__attn *plan;
    stx__attn_scratch buf;
    size_t    b, h;              /* batch row and head */
    size_t    i0, nb;            /* queries i0 .. i0+nb-1 */
    size_t    q0;                /* row of query i0 in the unit's buffers */
    size_t    ldt;
    ptrdiff_t j0;                /* first key, a multiple of KEY_ALIGN; < 0 for zero keys */
    size_t    bk;                /* number of keys, a multiple of KEY_ALIGN. No query sees
                                    keys past the last real key */
    size_t    clear_bk;          /* bk for which the margins of g are zero; 0: none */
    int       persistent;        /* 1: the keys are persistent vectors, starting at vector j0 */
    const int32_t *pad;          /* (S): padding flags of batch row b, or NULL */
    ptrdiff_t live0, live1;      /* columns outside [live0,live1) have only padded keys,
                                    or none */
    int       holes;             /* nonzero if keys in [live0,live1) are padded */
    char      absent[STX__BK];   /* if pad is set: nonzero for columns without a key */
    stx__attn_mask mask;
    ptrdiff_t lo[STX__BQ], hi[STX__BQ];    /* query r sees columns [lo[r],hi[r]) */
    ptrdiff_t farthest_column[STX__BQ];    /* column of the farthest key that each query
                                              reaches; can be negative */
} stx__attn_tile;

/* Returns the address of element i of an operand. An element has 2 bytes in bf16. */
static const void *stx__operand(const stx__attn *A, const void *base, ptrdiff_t i) {
    return (const char *)base + i * (ptrdiff_t)(A->per_word == 2 ? 2 : sizeof(stx_real));
}

static void stx__attn_plan(stx__attn *A, stx_ctx *x, const stx_attention_args *a) {
    size_t h, i, used;
    A->a = a;
    A->x = x;
    A->mk = stx__micro_kernel(x);
    A->per_word = stx__unit_elements(A->mk);
    A->Dk = stx__round_up(a->D, A->mk->kr);
    A->Dp = stx__round_up(a->D, A->mk->nr);
    A->separate_qv = a->content_bias || a->position_bias;
    A->tables = a->P ? (size_t)a->pe_heads : 0;
    A->farthest[0] = 0; /* in case H = 0 */
    for (h = 0; h < a->H; h++) {
        size_t e = stx__attn_farthest(a, h);
        for (i = h; i > 0 && A->farthest[i - 1] < e; i--) {
            A->farthest[i] = A->farthest[i - 1];
            A->order[i] = A->order[i - 1];
        }
        A->farthest[i] = e;
        A->order[i] = h;
    }

    used = A->farthest[0] + 1; /* some head reaches the last `used` rows of pe */
    A->pe_first = (ptrdiff_t)(a->P > used ? (a->P - used) / STX__NR_MAX * STX__NR_MAX : 0);
    A->pe_rows = 0;
    if (a->P)
        A->pe_rows = stx__round_up(a->P - (size_t)A->pe_first, STX_MAX(A->mk->nr, A->mk->kr));
    A->pe_columns = A->pe_packed_rows = NULL;
}

/* Divides an allocation into parts that begin at multiples of 64 bytes. With base =
   NULL, only adds up their sizes. */
typedef struct stx__cursor {
    char *base;
    size_t at;
} stx__cursor;

static void *stx__cut(stx__cursor *c, size_t bytes) {
    void *p = c->base ? c->base + c->at : NULL;
    c->at += stx__round_up(bytes, 64);
    return p;
}

/* Like stx__cut, but adds a margin of 64 bytes (one vector) after the part and returns
   a pointer to byte `skip` of the part. */
static void *stx__cut_padded(stx__cursor *c, size_t bytes, size_t skip) {
    char *p = (char *)stx__cut(c, bytes + 64);
    return p ? p + skip : NULL;
}

static stx_real *stx__cut_reals(stx__cursor *c, size_t n) {
    return (stx_real *)stx__cut_padded(c, n * sizeof(stx_real), 0);
}

/* Lays out the buffers of one thread for n queries at `base`. Returns their total size
   in bytes. With base = NULL, only computes the size. */
static size_t stx__attn_scratch_layout(const stx__attn *A, char *base, size_t n, int backward,
                                       stx__attn_scratch *buf) {
    const stx_attention_args *a = A->a;
    const int bf16 = A->per_word == 2;
    const size_t real = sizeof(stx_real), element = bf16 ? 2 : real;
    /* n32, Dk32, D32: rounded up to a multiple of the largest MR, NR and KR. They only
       determine sizes: the row stride of an operand is A->Dk */
    const size_t n32 = stx__round_up(n, 32), ldt = n32 + STX__STAGGER;
    const size_t Dk32 = stx__round_up(A->Dk, 32), D32 = stx__round_up(a->D, 32);
    const size_t rows = STX_MIN(n32, (size_t)STX__BQ), tile = rows * STX__LDS + 2 * STX__PAD;
    const size_t pairs = tile / 2 * 4 + 4 * STX__PAD; /* size in bytes */
    stx__cursor c;
    c.base = base;
    c.at = 0;
    memset(buf, 0, sizeof *buf);

    buf->q = buf->qv = stx__cut_padded(&c, n32 * Dk32 * element, 0);
    if (A->separate_qv) buf->qv = stx__cut_padded(&c, n32 * Dk32 * element, 0);
    buf->stage = stx__cut_reals(&c, rows * a->D);
    if (a->cached_rows) buf->gather = stx__cut_reals(&c, STX__BK * a->D);
    buf->out = stx__cut_reals(&c, n32 * A->Dp);
    buf->s = (stx_real *)stx__cut_padded(&c, tile * real, STX__PAD * real);
    if (bf16) buf->half = stx__cut_padded(&c, tile * element, STX__PAD * element);
    buf->k_columns = (stx_real *)stx__cut_padded(&c, STX__BK * Dk32 * element, 0);
    buf->rows = (stx_real *)stx__cut_padded(&c, STX__BK * A->Dp * element, 0);
    buf->state = stx__cut_reals(&c, 3 * n32);
    buf->m_by_distance = stx__cut_reals(&c, a->span_fraction ? A->farthest[0] + 2 : 1);
    buf->factors = stx__cut_reals(&c, STX__BK);
    if (!backward) return c.at;

    buf->q_t = buf->qv_t = stx__cut_padded(&c, D32 * ldt * element, 0);
    if (A->separate_qv) buf->qv_t = stx__cut_padded(&c, D32 * ldt * element, 0);
    buf->dy_t = stx__cut_padded(&c, D32 * ldt * element, 0);
    buf->dy = stx__cut_padded(&c, n32 * Dk32 * element, 0);
    buf->out_pe = stx__cut_reals(&c, n32 * A->Dp);
    buf->g = (stx_real *)stx__cut_padded(&c, tile * real, STX__PAD * real);
    buf->v_columns = (stx_real *)stx__cut_padded(&c, STX__BK * Dk32 * element, 0);
    buf->dk_t = stx__cut_reals(&c, D32 * STX__LDK);
    buf->dv_t = stx__cut_reals(&c, D32 * STX__LDK);
    if (bf16) {
        buf->s_pairs = (uint32_t *)stx__cut_padded(&c, pairs, STX__PAD * 4);
        buf->g_pairs = (uint32_t *)stx__cut_padded(&c, pairs, STX__PAD * 4);
        buf->skewed_pairs = (uint32_t *)stx__cut_padded(&c, pairs, STX__PAD * 4);
    }
    return c.at;
}

/* Converts `from` (n,cols), with a row stride of ldf, to an operand (n,ld). In bf16,
   rounds the elements and pads each row with zeros. Otherwise, ld must equal cols. */
static void stx__attn_operand(const stx__attn *A, void *to, size_t ld, const stx_real *from,
                              size_t ldf, size_t n, size_t cols) {
    size_t r, c;
    for (r = 0; r < n; r++)
        if (A->per_word == 2) {
            uint16_t *t = (uint16_t *)to + r * ld;
            A->mk->to_bf16(t, from + r * ldf, cols);
            for (c = cols; c < ld; c++) t[c] = 0;
        } else {
            memcpy((stx_real *)to + r * ld, from + r * ldf, cols * sizeof(stx_real));
        }
}

/* Transposes `from` (n,cols), with a row stride of ldf and n <= BQ, into columns
   [at,at+n) of an operand (cols,ld), and sets the columns after them to zero up to the
   next multiple of 32. Each step transposes NR words of every column. In bf16, each
   element is first paired with its neighbour in the next row, so that whole words are
   moved. */
static void stx__attn_transpose(const stx__attn *A, void *to, size_t ld, size_t at,
                                const stx_real *from, size_t ldf, size_t n, size_t cols) {
    const stx__micro *mk = A->mk;
    const size_t u = A->per_word, nr = mk->nr, element = u == 2 ? 2 : sizeof(stx_real);
    const size_t end = stx__round_up(n, 32);
    stx_real pairs[(size_t)STX__NR_MAX * STX__TRANSPOSE_PIECE];
    stx_real columns[(size_t)STX__NR_MAX * STX__TRANSPOSE_PIECE];
    size_t c, r, d, i;
    for (c = 0; c < cols; c += STX__TRANSPOSE_PIECE)
        for (r = 0; r < end; r += u * nr) {
            const size_t w = STX_MIN((size_t)STX__TRANSPOSE_PIECE, cols - c);
            const size_t rows = r < n ? STX_MIN(u * nr, n - r) : 0;
            const stx_real *f = from + r * ldf + c;
            if (u == 2) {
                for (i = 0; i < rows; i += 2)
                    mk->pair((uint32_t *)(void *)pairs + i / 2 * STX__TRANSPOSE_PIECE, f + i * ldf,
                             i + 1 < rows ? f + (i + 1) * ldf : NULL, w);
                stx__transpose_for(mk, columns, pairs, STX__TRANSPOSE_PIECE, (rows + 1) / 2, w);
            } else {
                stx__transpose_for(mk, columns, f, ldf, rows, w);
            }
            for (d = 0; d < w; d++)
                memcpy((char *)to + ((c + d) * ld + at + r) * element, columns + d * nr,
                       STX_MIN(u * nr, end - r) * element);
        }
}

/* Packs pe as columns, for qv . pe. All units share the result. The next function packs
   pe as rows, for the backward pass. */
static void stx__attn_pe_columns_part(const stx_share *s, const void *job) {
    const stx__attn *A = (const stx__attn *)job;
    const stx_attention_args *a = A->a;
    const size_t nr = A->mk->nr, rows = a->P - (size_t)A->pe_first, strips = A->pe_rows / nr;
    const size_t ldp = A->tables * a->D;
    size_t i;
    for (i = s->begin; i < s->end; i++) {
        const size_t h = i / strips, j = i % strips * nr;
        stx__pack_b(A->mk, A->pe_columns + (h * A->pe_rows + j) * A->Dk / A->per_word, nr,
                    a->pe + ((size_t)A->pe_first + j) * ldp + h * a->D, ldp, 1, a->D,
                    STX_MIN(nr, rows - j));
    }
}

static void stx__attn_pe_rows_part(const stx_share *s, const void *job) {
    const stx__attn *A = (const stx__attn *)job;
    const stx_attention_args *a = A->a;
    const size_t nr = A->mk->nr, rows = a->P - (size_t)A->pe_first, strips = A->Dp / nr;
    const size_t ldp = A->tables * a->D, done = stx__round_up(rows, A->mk->kr);
    size_t i;
    for (i = s->begin; i < s->end; i++) {
        const size_t h = i / strips, j = i % strips * nr;
        stx_real *to = A->pe_packed_rows + (h * A->Dp + j) * A->pe_rows / A->per_word;
        stx__pack_b(A->mk, to, nr, a->pe + (size_t)A->pe_first * ldp + h * a->D + j, ldp, 0, rows,
                    STX_MIN(nr, a->D - j));
        /* the padding is multiplied by zeros of ds, so it must not be NaN */
        memset(to + done / A->per_word * nr, 0,
               (A->pe_rows - done) / A->per_word * nr * sizeof *to);
    }
}

static void stx__attn_pack_pe(stx_ctx *x, const stx__attn *A, int backward) {
    size_t work = A->tables * (A->a->P - (size_t)A->pe_first) * A->a->D;
    if (!A->tables) return;
    stx_parallel(x, A->tables * (A->pe_rows / A->mk->nr), work, stx__attn_pe_columns_part, A);
    if (backward)
        stx_parallel(x, A->tables * (A->Dp / A->mk->nr), work, stx__attn_pe_rows_part, A);
}

/* Returns the span mask m of head h. The operations are in the same order as in the
   code of the paper's authors. */
static stx__attn_mask stx__attn_mask_of(const stx_attention_args *a, size_t h,
                                        stx_real *m_by_distance) {
    stx__attn_mask k;
    stx_real span;
    size_t n;
    k.farthest = stx__attn_farthest(a, h);
    k.m_by_distance = m_by_distance;
    k.count = k.zeros = k.begin = k.end = 0;
    if (!a->span_fraction) return k;
    span = stx__attn_span_fraction(a, h) * a->max_span;
    for (n = 0; n <= k.farthest; n++) {
        stx_real m = ((1 - (stx_real)(k.farthest - n)) + span) / a->ramp + 1;
        if (m < 0) k.begin = n + 1;
        if (m <= 1) k.end = n + 1;
        if (m >= 1) break;
        if (m <= 0) k.zeros = n + 1;
        m_by_distance[n] = m <= 0 ? 0 : m; /* a NaN in span_fraction reaches y */
    }
    k.count = n;
    return k;
}

/* Returns the padding flags (S) of batch row b, nonzero for padded keys, or NULL if no
   key is padded. */
static const int32_t *stx__attn_pad(const stx_attention_args *a, size_t b) {
    return a->pad ? a->pad + b * a->pad_batch_stride : NULL;
}

/* Prepares t for the tiles of head h of batch row b. */
static void stx__attn_open(const stx__attn *A, stx__attn_tile *t, size_t b, size_t h) {
    t->plan = A;
    t->b = b;
    t->h = h;
    t->clear_bk = 0;
    t->persistent = 0;
    t->pad = stx__attn_pad(A->a, b);
    t->mask = stx__attn_mask_of(A->a, h, t->buf.m_by_distance);
}

/* Zeros ds and its copies, including the margins, which then stay zero until bk
   changes. Rows past the last query are zeroed as well, because kernels read them: bf16
   kernels process 2 rows at a time, and AMX kernels 32. */
static void stx__attn_clear(stx__attn_tile *t) {
    const size_t rows = STX_MIN(stx__round_up(t->plan->a->T, 32), (size_t)STX__BQ);
    const size_t n = t->bk + 2 * STX__PAD;
    uint16_t *half = (uint16_t *)t->buf.half;
    size_t r;
    for (r = 0; r < rows; r++) {
        memset(t->buf.g + r * STX__LDS - STX__PAD, 0, n * sizeof *t->buf.g);
        if (half) memset(half + r * STX__LDS - STX__PAD, 0, n * sizeof *half);
        if (t->buf.skewed_pairs && r % 2 == 0)
            memset(t->buf.skewed_pairs + r / 2 * STX__LDS - STX__PAD, 0,
                   n * sizeof *t->buf.skewed_pairs);
    }
}

/* Sets `to` (n,D) to scale (q + bias). bias may be NULL. */
STX_INNER void stx__attn_scaled(int fma, stx_real *STX_RESTRICT to, const stx_real *STX_RESTRICT q,
                                size_t ldq, const stx_real *STX_RESTRICT bias, stx_real scale,
                                size_t n, size_t D) {
    size_t r, d;
    (void)fma;
    for (r = 0; r < n; r++, to += D, q += ldq)
        if (bias)
            for (d = 0; d < D; d++) to[d] = scale * (q[d] + bias[d]);
        else
            for (d = 0; d < D; d++) to[d] = scale * q[d];
}

STX_EACH_ISA(stx__attn_scaled,
             (stx_real * STX_RESTRICT to, const stx_real *STX_RESTRICT q, size_t ldq,
              const stx_real *STX_RESTRICT bias, stx_real scale, size_t n, size_t D),
             to, q, ldq, bias, scale, n, D)

/* Packs scale (q + bias) of queries i0 .. i0+n-1 into the operand `to` (n,Dk) and,
   unless `transposed` is NULL, into its transpose (D,ldt). bias (H D) may be NULL. */
static void stx__attn_queries(stx__attn_tile *t, void *to, void *transposed, const stx_real *bias,
                              stx_real scale, size_t i0, size_t n) {
    const stx__attn *A = t->plan;
    const stx_attention_args *a = A->a;
    const size_t D = a->D, Dk = A->Dk;
    const stx_real *q = a->q + t->b * a->q_batch_stride + i0 * a->q_row_stride + t->h * D;
    size_t q0;
    if (bias) bias += t->h * D;
    for (q0 = 0; q0 < n; q0 += STX__BQ) {
        const size_t nb = STX_MIN((size_t)STX__BQ, n - q0);
        STX_CALL(A->x, stx__attn_scaled,
                 (t->buf.stage, q + q0 * a->q_row_stride, a->q_row_stride, bias, scale, nb, D));
        stx__attn_operand(A, (void *)(uintptr_t)stx__operand(A, to, (ptrdiff_t)(q0 * Dk)), Dk,
                          t->buf.stage, D, nb, D);
        if (transposed) stx__attn_transpose(A, transposed, t->ldt, q0, t->buf.stage, D, nb, D);
    }
}

/* Determines which keys of the tile are not padded. Returns 0 if there are none. All
   other limits, such as first_key and the distances, are part of stx__attn_bounds. */
static int stx__attn_live(stx__attn_tile *t) {
    ptrdiff_t c, j;
    t->live0 = 0;
    t->live1 = (ptrdiff_t)t->bk;
    t->holes = 0;
    if (!t->pad || t->persistent) return 1;
    for (c = 0; c < t->live1; c++) {
        j = t->j0 + c;
        t->absent[c] = j >= (ptrdiff_t)t->plan->a->S || (j >= 0 && t->pad[j] != 0);
    }
    while (t->live1 > 0 && t->absent[t->live1 - 1]) t->live1--;
    while (t->live0 < t->live1 && t->absent[t->live0]) t->live0++;
    for (c = t->live0; c < t->live1; c++) t->holes |= t->absent[c];
    return t->live0 < t->live1;
}

/* Masks the padded keys in columns [lo,hi) of a row: sets their scores to -inf, so that
   e^s = 0, and their g to 0 unless g is NULL. Returns 0 if all keys are padded. */
static int stx__attn_holes(const stx__attn_tile *t, stx_real *s, stx_real *g, ptrdiff_t lo,
                           ptrdiff_t hi) {
    ptrdiff_t c;
    int any = 0;
    for (c = lo; c < hi; c++) {
        if (!t->absent[c]) {
            any = 1;
            continue;
        }
        s[c] = -(stx_real)HUGE_VAL;
        if (g) g[c] = 0;
    }
    return any;
}

/* The rows of a tile's keys or values in one array: n rows, `stride` elements apart,
   for columns skip .. skip+n-1. The columns before `skip` are zero keys; the columns
   after the n rows have no key. */
typedef struct stx__attn_tile_rows {
    const stx_real *row;
    size_t n, stride, skip; /* skip is a multiple of KEY_ALIGN, like j0 */
} stx__attn_tile_rows;

/* Collects the rows of the tile's keys below `end`. Copies them if they are not
   contiguous: if some are cached and some are in the block, or if the oldest ones are no
   longer stored. No query sees keys that are not stored; their rows are set to zero. */
static stx__attn_tile_rows stx__attn_collect(stx__attn_tile *t, const stx__kv_rows *rows,
                                             ptrdiff_t end) {
    const ptrdiff_t from = STX_MAX(t->j0, 0), to = STX_MIN(end, t->j0 + (ptrdiff_t)t->bk);
    const size_t D = t->plan->a->D;
    stx__attn_tile_rows r;
    size_t i;
    r.n = to > from ? (size_t)(to - from) : 0;
    r.skip = r.n ? (size_t)(from - t->j0) : t->bk;
    r.row = rows->block;
    r.stride = from >= rows->block_first ? rows->block_stride : rows->cached_stride;
    if (!r.n) return r;
    if (from >= rows->block_first || (from >= rows->cached_first && to <= rows->block_first)) {
        r.row = stx__kv_row(rows, from);
        return r;
    }

    for (i = 0; i < r.n; i++) {
        const stx_real *row = stx__kv_row(rows, from + (ptrdiff_t)i);
        if (row)
            memcpy(t->buf.gather + i * D, row, D * sizeof *row);
        else
            memset(t->buf.gather + i * D, 0, D * sizeof *row);
    }
    r.row = t->buf.gather;
    r.stride = D;
    return r;
}

/* Packs the rows as columns of words (BK/NR,Dk/per_word,NR), with zeros in the columns
   that have no row. */
static void stx__attn_pack_columns(const stx__attn_tile *t, const stx__attn_tile_rows *r,
                                   stx_real *to) {
    const stx__attn *A = t->plan;
    const size_t nr = A->mk->nr, u = A->per_word, Dk = A->Dk;
    const size_t done = stx__round_up(r->skip + r->n, nr);
    memset(to, 0, r->skip * Dk / u * sizeof *to);
    if (r->n)
        stx__pack_b(A->mk, to + r->skip * Dk / u, nr * Dk / u, r->row, r->stride, 1, A->a->D,
                    r->n);
    memset(to + done * Dk / u, 0, (t->bk - done) * Dk / u * sizeof *to);
}

/* Zeros row i of a strip of packed rows. In bf16, a word holds an even row and the next
   one. */
static void stx__attn_zero_row(const stx__attn *A, stx_real *strip, size_t i) {
    const size_t nr = A->mk->nr;
    uint32_t *words = (uint32_t *)(void *)strip + i / 2 * nr;
    size_t e;
    if (A->per_word == 1)
        memset(strip + i * nr, 0, nr * sizeof *strip);
    else
        for (e = 0; e < nr; e++) words[e] &= i % 2 ? 0x0000ffffu : 0xffff0000u;
}

/* Packs the rows as rows of words (Dp/NR,BK/per_word,NR). Zeros the rows before first_key
   and padded rows: they are multiplied by weights of 0, so they must not be NaN. */
static void stx__attn_pack_rows(const stx__attn_tile *t, const stx__attn_tile_rows *r,
                                stx_real *to) {
    const stx__attn *A = t->plan;
    const size_t nr = A->mk->nr, u = A->per_word, D = A->a->D;
    const size_t done = stx__round_up(r->skip + r->n, A->mk->kr);
    const ptrdiff_t missing = t->persistent ? 0 : A->a->first_key - t->j0;
    const size_t hidden = missing > 0 ? (size_t)STX_MIN(missing, (ptrdiff_t)t->bk) : 0;
    size_t j, i;
    for (j = 0; j < D; j += nr) {
        stx_real *strip = to + j * (STX__BK / u);
        memset(strip, 0, r->skip / u * nr * sizeof *strip);
        if (r->n)
            stx__pack_b(A->mk, strip + r->skip / u * nr, nr, r->row + j, r->stride, 0, r->n,
                        STX_MIN(nr, D - j));
        memset(strip, 0, hidden / u * nr * sizeof *strip);
        if (hidden % u) stx__attn_zero_row(A, strip, hidden - 1);
        memset(strip + done / u * nr, 0, (t->bk - done) / u * nr * sizeof *strip);
        if (!t->pad || t->persistent) continue;
        for (i = 0; i < t->bk; i++)
            if (t->absent[i]) stx__attn_zero_row(A, strip, i);
    }
}

/* Packs the keys or values of the tile that are below `end`, as columns and as rows.
   Either destination may be NULL. */
static void stx__attn_pack(stx__attn_tile *t, const stx__kv_rows *rows, ptrdiff_t end,
                           stx_real *columns, stx_real *packed_rows) {
    const stx__attn_tile_rows r = stx__attn_collect(t, rows, end);
    if (columns) stx__attn_pack_columns(t, &r, columns);
    if (packed_rows) stx__attn_pack_rows(t, &r, packed_rows);
}

/* Prefetches rows [from,to) of a head, so that they arrive while a tile is computed.
   Their stride is too large for the hardware prefetcher. */
static void stx__attn_prefetch(const stx__kv_rows *r, ptrdiff_t from, ptrdiff_t to, size_t D) {
#ifdef STX__PREFETCHES
    ptrdiff_t j;
    size_t d;
    if (!r->block) return;
    for (j = STX_MAX(from, r->cached ? r->cached_first : r->block_first); j < to; j++) {
        const stx_real *row = stx__kv_row(r, j);
        for (d = 0; d < D; d += 64 / sizeof *row) __builtin_prefetch(row + d, 0, 2);
    }
#else
    (void)r;
    (void)from;
    (void)to;
    (void)D;
#endif
}
