/* cuda_model.h - the configurations of the GPU benchmarks, and formulas for the
   operations and bytes of one training step of each. No GPU is required. Letters: B
   streams, M tokens per stream and step, N = B M, d width, f inner width, H heads,
   D = d / H, L largest span, S_l working span of layer l, E mean keys per query and
   head, P persistent vectors, V vocabulary size. */
#ifndef BENCH_CUDA_MODEL_H
#define BENCH_CUDA_MODEL_H
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

/* Spans of the heads. FULL: all L. LEARNED: similar to learned spans. ALL: all `reach`.
   ONE: L for one head and `reach` for the others. */
enum { SPANS_FULL, SPANS_LEARNED, SPANS_ALL, SPANS_ONE };

typedef struct config {
    const char *name, *what;
    size_t layers, dim, inner, heads, span, block, batch, pers;
    int spans;
    double reach; /* in tokens: span of SPANS_ALL and SPANS_ONE, limit of SPANS_LEARNED (0: none) */
    int steps;    /* timed steps per round */
    size_t vocab; /* vocabulary size; 0: VOCAB */
} config;

enum { VOCAB = 256, RAMP = 32, TRIM = 64 };

static const config configs[] = {
    {"small-full", "adaptive-span small, all spans 1024", 8, 256, 1024, 4, 1024, 256, 64, 0,
     SPANS_FULL, 0, 30, 0},
    {"small", "adaptive-span small, learned-like spans", 8, 256, 1024, 4, 1024, 256, 64, 0,
     SPANS_LEARNED, 0, 30, 0},
    {"12x512", "adaptive-span 12x512, learned-like spans", 12, 512, 2048, 8, 8192, 512, 64, 0,
     SPANS_LEARNED, 0, 10, 0},
    {"24x768", "adaptive-span 24x768, learned-like spans", 24, 768, 4096, 8, 8192, 512, 64, 0,
     SPANS_LEARNED, 0, 4, 0},
    {"all-attention", "all-attention 18x512, 1024 persistent vectors, learned-like spans", 18, 512,
     0, 8, 8192, 512, 64, 1024, SPANS_LEARNED, 0, 8, 0},
    {"small-205", "small with a vocabulary of 205, whose rows are padded to 256", 8, 256, 1024, 4,
     1024, 256, 64, 0, SPANS_LEARNED, 0, 30, 205}};

enum { CONFIGS = sizeof configs / sizeof *configs };

static inline size_t vocab_of(const config *c) {
    return c->vocab ? c->vocab : VOCAB;
}

/* Returns a miniature version of a configuration, for a machine without a GPU. */
static inline config tiny(config c) {
    c.layers = 3;
    c.dim = 32;
    c.inner = 64;
    c.heads = 2;
    c.span = c.span > 1024 ? 160 : 96;
    c.block = 16;
    c.batch = 2;
    c.pers = c.pers ? 8 : 0;
    c.steps = 1;
    if (c.reach > 40) c.reach = 40;
    return c;
}

/* Returns the span of head h of layer l in tokens. SPANS_LEARNED has short heads in the
   lower layers and a few long ones in the upper layers, as trained models do. The
   longest span of a layer is a multiple of 64 (for L = 1024 or 8192). The working span
   changes in steps of 64. With the ramp of 32, these spans are half a step away from
   the next change on either side, so that the few updates of a benchmark do not change
   the working span. */
static inline double span_of(const config *c, size_t l, size_t h) {
    static const double small[3][4] = {{64, 20, 20, 20}, {320, 40, 40, 40}, {896, 320, 40, 40}};
    static const double large[3][8] = {{192, 24, 24, 24, 24, 24, 24, 24},
                                       {1024, 512, 128, 48, 48, 48, 48, 48},
                                       {2048, 1024, 1024, 512, 64, 64, 64, 64}};
    size_t third = 3 * l / c->layers;
    double v;
    if (c->spans == SPANS_FULL || (c->spans == SPANS_ONE && h == 0)) return (double)c->span;
    if (c->spans == SPANS_ALL || c->spans == SPANS_ONE) return c->reach;
    v = c->span > 1024 || c->heads > 4 ? large[third][h % 8] : small[third][h % 4];
    /* limited, so that it is the same in models of any L */
    if (c->reach > 0 && v > c->reach) v = c->reach;
    return v < (double)c->span ? v : (double)c->span;
}

/* Returns the number of keys per query of a head, at distances 1 .. z L + R, where the
   mask is above 0. */
static inline double keys_of(const config *c, size_t l, size_t h) {
    double e = span_of(c, l, h) + RAMP;
    return e < (double)c->span ? e : (double)c->span;
}

/* Returns the working span of a layer: the number of memory rows that are projected per
   step when the memory is full. */
static inline double window_of(const config *c, size_t l) {
    double top = 0, L = (double)c->span, reach, trim;
    size_t h;
    for (h = 0; h < c->heads; h++)
        if (span_of(c, l, h) > top) top = span_of(c, l, h);
    reach = ceil(top) + RAMP < L ? ceil(top) + RAMP : L;
    trim = L - reach < L - 1 ? L - reach : L - 1;
    return L - TRIM * floor(trim / TRIM);
}

/* Divides the n heads, sorted by decreasing window w, into at most three groups: heads
   0 .. *a - 1, *a .. *b - 1 and *b .. n - 1. The first group projects m rows, and each
   further group the longest window of its heads. Each further group also adds the cost
   of 64 rows of all heads. */
static inline void group_cuts(const double *w, size_t n, double m, size_t *a, size_t *b) {
    double H = (double)n, best = m * H, cost;
    size_t i, j, k;
    *a = *b = n;
    for (i = 1; i < n; i++)
        for (j = i + 1; j <= n; j++) {
            if (w[i] == w[i - 1] || (j < n && w[j] == w[j - 1])) continue;
            cost = 64 * H * (j < n ? 2 : 1);
            for (k = 0; k < i; k++) cost += m;
            for (k = i; k < n; k++) cost += w[k < j ? i : j];
            if (cost < best) {
                best = cost;
                *a = i;
                *b = j;
            }
        }
}

/* Divides the heads of a layer into groups with separate windows over the memory rows
   (stx_head_groups_choose). Returns the number of groups; `rows` and `heads` receive
   the number of rows and of heads of each group. There is only one group if more would
   save too few rows (see stx__span_groups in seqtx_attn_span.h). */
static inline int groups_of(const config *c, size_t l, double rows[3], double heads[3]) {
    double m = window_of(c, l), w[256], saved = 0;
    size_t n = c->heads, h, i, a, b;
    int groups = 1;
    for (h = 0; h < n; h++) {
        double need = 64 * ceil((keys_of(c, l, h) + 1) / 64);
        if (need > m) need = m;
        for (i = h; i > 0 && w[i - 1] < need; i--) w[i] = w[i - 1];
        w[i] = need;
    }
    group_cuts(w, n, m, &a, &b);
    for (h = a; h < n; h++) saved += m - w[h < b ? a : b];
    if ((double)c->batch * saved < 3 * (double)n * (double)c->dim) a = b = n;
    rows[0] = m;
    heads[0] = (double)a;
    if (a < n) {
        rows[groups] = w[a];
        heads[groups++] = (double)(b - a);
    }
    if (b < n) {
        rows[groups] = w[b];
        heads[groups++] = (double)(n - b);
    }
    return groups;
}

static inline double mean_keys(const config *c) {
    double sum = 0;
    size_t l, h;
    for (l = 0; l < c->layers; l++)
        for (h = 0; h < c->heads; h++) sum += keys_of(c, l, h);
    return sum / (double)(c->layers * c->heads);
}

static inline double mean_window(const config *c) {
    double sum = 0;
    size_t l;
    for (l = 0; l < c->layers; l++) sum += window_of(c, l);
    return sum / (double)c->layers;
}

static inline double parameters(const config *c) {
    double d = (double)c->dim, f = (double)c->inner, layer = 4 * d * d + 2 * d + (double)c->heads;
    layer += c->pers ? 2 * (double)c->pers * d : 2 * d * f + f + 3 * d;
    return d / (double)c->heads * (double)c->span + (double)vocab_of(c) * (2 * d + 1)
           + (double)c->layers * layer;
}


// >>counted work of one training step in bfloat16. An element takes 2 bytes in
// activations and in bfloat16 copies of weights, and 4 bytes in parameters and their
// gradients.

enum { MATMULS, ATTENTION, PASSES, UPDATE, GROUPS };

/* calls: nodes of the step's graph (test_cuda_model nodes, test_cuda_comp nodes and
   test_cuda_par nodes count them under the shim). flop: the required operations,
   including recomputed logits in the backward pass of attention. run: the operations
   that the kernels execute. ms: roofline time of `flop` and `bytes`. plan: time at the
   expected rates (for attention, of `run`), without the time per node. */
typedef struct work_row {
    const char *name;
    int group;
    double calls, flop, run, bytes, ms, plan;
} work_row;

typedef struct work {
    work_row row[40];
    int rows;
    /* operations for MFU: attention has 3 matmuls forward and 6 backward, without
       recomputation */
    double model_flop;
    /* sums: number of sums over rows with a deferred second stage. sum_bytes: bytes
       that this stage reads */
    double sums, sum_bytes;
    /* cut: number of weight gradients that are split along K. cut_bytes: bytes of their
       slices. cut_dw: bytes of dW that are read and written */
    double cut, cut_bytes, cut_dw;
} work;

/* The machine of the roofline: an H200. */
static const double ROOF_FLOPS = 790e12, ROOF_BYTES = 4.3e12;
/* Expected values for that machine, which were not measured: the fraction of the
   roofline that matmuls and passes reach, attention operations per second in the
   forward and the backward pass, and microseconds between two nodes of a graph. */
static const double PLAN_MATMULS = 0.75, PLAN_BYTES = 0.8, PLAN_FORWARD = 250e12,
                    PLAN_BACKWARD = 200e12, PLAN_NODE = 1.5;

static inline void work_add(work *w, const char *name, int group, double calls, double flop,
                            double bytes) {
    double a = flop / ROOF_FLOPS, b = bytes / ROOF_BYTES;
    int i;
    for (i = 0; i < w->rows && strcmp(w->row[i].name, name); i++) continue;
    if (i == w->rows) {
        w->row[i].name = name;
        w->row[i].group = group;
        w->rows++;
    }
    w->row[i].calls += calls;
    w->row[i].flop += flop;
    w->row[i].run += flop;
    w->row[i].bytes += bytes;
    w->row[i].ms += 1e3 * (a > b ? a : b);
    a /= PLAN_MATMULS;
    b /= PLAN_BYTES;
    w->row[i].plan += 1e3 * (a > b && group != ATTENTION ? a : b);
}

/* Adds `count` sums over N rows of C elements: a first stage in chunks (stx__chunk),
   and a deferred second stage ("Deferred sums" in seqtx_cuda.cu), with one graph node
   per 24 sums or 32 MiB of partial sums. */
static inline void work_sums(work *w, double N, double C, double count, double least, double most) {
    double rows = ceil(ceil(N / most) / 8) * 8;
    w->sums += count;
    w->sum_bytes += ceil(N / (rows < least ? least : rows)) * C * 4 * count;
}

static inline void work_sums_made(work *w) {
    double by_count = ceil(w->sums / 24), by_bytes = ceil(w->sum_bytes / (32 << 20));
    work_add(w, "sums of rows, second stage", PASSES, by_count > by_bytes ? by_count : by_bytes, 0,
             2 * w->sum_bytes);
    by_count = ceil(w->cut / 24);
    by_bytes = ceil(w->cut_bytes / (64 << 20));
    if (w->cut > 0)
        work_add(w, "sums of pieces of dW", PASSES, by_count > by_bytes ? by_count : by_bytes, 0,
                 w->cut_bytes + w->cut_dw);
}

/* Returns the number of slices of K ("Split K" in seqtx_cuda.cu) for a weight gradient
   of shape (o,i) that sums over n rows. work_busy returns the fraction of 132
   multiprocessors that tiles of 128 x 128 keep busy. */
static inline double work_pieces(double o, double i, double n) {
    size_t tiles = (size_t)(ceil(o / 128) * ceil(i / 128)), K = (size_t)n, best = 1,
           least = (tiles + 127) / 128 * K, p;
    for (p = 2; p <= 64 && K / p >= 256 && (double)p * o * i * 4 <= 32 << 20; p++) {
        size_t cost = (tiles * p + 127) / 128 * (K / p) + p * (size_t)o * (size_t)i / 3072 + 32;
        if (K % p == 0 && cost < least) {
            least = cost;
            best = p;
        }
    }
    return (double)best;
}

static inline double work_busy(double o, double i, double pieces) {
    double tiles = ceil(o / 128) * ceil(i / 128) * pieces;
    return tiles / (132 * ceil(tiles / 132));
}

/* Returns the number of logit columns on the GPU ("Padded logits" in seqtx.h). */
static inline double work_padded(double V) {
    return fmod(V, 8) != 0 ? ceil(V / 64) * 64 : V;
}

/* The following functions count the operations that the attention kernels execute in
   bfloat16, tile by tile in the order of the kernels (>>attention in seqtx_cuda.cu).
   This includes rows and columns of a tile outside the window, padded channels of a
   head, and what each sweep of the backward pass recomputes. Groups of 16 keys that no
   query of a strip of 16 sees are not counted. The unit is a matmul of 16 queries, BK
   keys and DP channels, which is 32 BK DP operations. */
typedef struct tiles {
    double T, C, S, live, span, lo;
    /* strip: queries per warp; columns: columns of dR per block of the table kernel */
    int D, DP, BQ, BK, strip, columns;
    double full; /* distance up to which keys have full weight */
} tiles;

static inline int tiles_channels(double D) {
    return D <= 96 ? 32 * (int)ceil(D / 32) : 128;
}

static inline tiles tiles_of(const config *c, double window, double live, int wide) {
    tiles t;
    t.T = (double)c->block;
    t.C = window;
    t.S = window + t.T;
    t.live = live;
    t.span = window;
    t.lo = 0;
    t.full = live;
    t.D = (int)(c->dim / c->heads);
    t.DP = tiles_channels(t.D);
    t.strip = wide ? 32 : 16;
    t.BQ = 4 * t.strip;
    t.BK = t.DP <= 64 ? 64 : 32;
    t.columns = t.DP <= 64 ? 128 : 64;
    return t;
}

static inline double tiles_from(const tiles *t, double key) {
    return key > t->lo ? key : t->lo;
}

static inline double tiles_begin(const tiles *t, double first, int by) {
    return floor((first + t->span) / by) * by - t->span;
}

/* Returns the number of 16-key groups of the tile at j0 that the 16 queries starting at
   i, including queries beyond T, see at distances 1 .. far. */
static inline double tiles_groups(const tiles *t, double i, double j0, double far) {
    /* first .. last - 1: the keys that the queries see */
    double first = t->C + i - far, last = t->C + i + 15, end = j0 + t->BK;
    if (i >= t->T) return 0;
    first = tiles_from(t, first);
    last = last < t->S ? last : t->S;
    first = first > j0 ? floor((first - j0) / 16) : 0;
    last = ceil(((last < end ? last : end) - j0) / 16);
    return last > first ? last - first : 0;
}

/* Returns the units of the forward pass per head and batch row, for positions, logits
   and values. Positions need 16 extra columns at the start of each strip and, for a
   warp with 32 rows, in each tile inside the window. */
static inline double tiles_forward(const tiles *t) {
    double i0, j0, i, units = 0;
    int strips = t->strip / 16, m;
    for (i0 = 0; i0 < t->T; i0 += t->BQ) {
        double last = t->C + (i0 + t->BQ < t->T ? i0 + t->BQ : t->T) - 1,
               first = tiles_from(t, t->C + i0 - t->live);
        for (i = i0; i < i0 + t->BQ && first < last; i += t->strip) {
            int started[2] = {0, 0};
            for (j0 = tiles_begin(t, first, 8); j0 < last; j0 += t->BK) {
                int edge = t->C + i - (j0 + t->BK - 1) < 1 || t->C + i + t->strip - 1 - j0 > t->full
                           || j0 < t->lo;
                if (!edge && i < t->T)
                    units += strips * (3 * t->BK / 16) + strips - started[strips - 1];
                for (m = 0; m < strips; m++) {
                    double n = edge ? tiles_groups(t, i + 16 * m, j0, t->live) : 0;
                    if (n > 0) units += 3 * n + !started[m];
                    if (n > 0 || !edge) started[m] = 1;
                }
            }
        }
    }
    return units * 16 / t->BK;
}

/* Returns the units of the query sweep, for positions, logits, dO V^T, ds K and dR PE,
   with 16 more positions per tile. */
static inline double tiles_queries(const tiles *t) {
    /* the gradient of z includes one more distance */
    double i0, j0, i, units = 0, far = t->live < t->span ? t->live + 1 : t->span;
    for (i0 = 0; i0 < t->T; i0 += t->BQ) {
        double last = t->C + (i0 + t->BQ < t->T ? i0 + t->BQ : t->T) - 1,
               first = tiles_from(t, t->C + i0 - far);
        for (j0 = tiles_begin(t, first, 16); first < last && j0 < last; j0 += t->BK)
            for (i = i0; i < i0 + t->BQ; i += 16) {
                double n = tiles_groups(t, i, j0, far);
                units += n > 0 ? 3 * n + 2 * (n + 1) : 0;
            }
    }
    return units * 16 / t->BK;
}

/* Returns the units of the key sweep, for positions, logits, dO V^T, dV and dK. */
static inline double tiles_keys(const tiles *t) {
    double i0, j0, i, n, units = 0;
    for (j0 = tiles_begin(t, tiles_from(t, t->C - t->span), 8); j0 < t->S; j0 += t->BK) {
        double lo = j0 + 1 - t->C > 0 ? j0 + 1 - t->C : 0,
               hi = j0 + t->BK + t->live - t->C < t->T ? j0 + t->BK + t->live - t->C : t->T;
        for (i0 = lo; i0 < hi; i0 += t->BQ)
            for (i = i0; i < i0 + t->BQ; i += 16) {
                n = tiles_groups(t, i, j0, t->live);
                units += n > 0 ? 4 * n + n + 1 : 0;
            }
    }
    return units * 16 / t->BK;
}

/* Returns the units of the diagonal sweep, for positions, logits, dO V^T and dPE. */
static inline double tiles_diagonals(const tiles *t) {
    double first = t->C - 1 + t->BQ - t->BK, extra, n, g, i0, i, units = 0;
    extra = ceil((first + t->span) / 8) * 8 - (first + t->span);
    first += extra;
    for (n = 0; n <= floor((t->span - 1 + t->BQ - 1 + extra) / t->BK); n++) {
        double off = first - t->BK * n;
        if (t->C - off - (t->BK - 1) > t->live) continue;
        for (i0 = 0; i0 < t->T; i0 += t->BQ) {
            if (i0 + off + t->BK <= t->lo || i0 + off >= t->S) continue;
            for (i = i0; i < i0 + t->BQ; i += 16) {
                g = tiles_groups(t, i, i0 + off, t->live);
                units += g > 0 ? 2 * g + 2 * (g + 1) : 0;
            }
        }
    }
    return units * 16 / t->BK;
}

/* tiles_newest returns the key position of the newest column of dR, which depends on
   the start of the window. tiles_width returns the number of columns of dR for `live`
   distances, and tiles_table the units that compute dPE from dR. */
static inline double tiles_newest(const tiles *t) {
    return t->C + 15 - fmod(t->C + t->span + 15, 16);
}

static inline double tiles_width(const tiles *t, double live) {
    return live < 1 ? 0 : ceil((live - (t->C - tiles_newest(t))) / 16) * 16;
}

static inline double tiles_table(const tiles *t) {
    double back, units = 0, width = tiles_width(t, t->live);
    for (back = 0; back < width; back += t->columns) {
        double lo = t->lo - (tiles_newest(t) - 1 - back);
        lo = lo > 0 ? floor(lo / t->BQ) * t->BQ : 0;
        if (lo < t->T) units += ceil((t->T - lo) / t->BQ) * (t->BQ / 16) * t->columns / t->BK;
    }
    return units;
}

/* Returns the total number of dR columns that the heads of a layer may have, or 0 if no
   head has a dR, as stx__attn_bwd_plan_of decides. */
static inline double tiles_capacity(const tiles *t, double batch, double heads) {
    double all = tiles_width(t, t->span) * heads,
           most = floor((256 << 20) / (batch * ceil(t->T / t->BQ) * t->BQ * 2));
    if (most >= all) return all;
    return most >= 64 ? floor(most / 16) * 16 : 0;
}

/* Returns the units of N persistent vectors: 2 matmuls in the forward pass and 7 in the
   backward pass, for all queries. The number of queries is rounded up to whole strips
   of 16 or, in inner tiles of the forward pass, to whole warps. */
static inline double tiles_vectors(const tiles *t, double N, int backward) {
    double shift = (double)(((size_t)t->S + (size_t)t->span) & 7), strips = ceil(t->T / 16),
           units = 0, j;
    for (j = N > 0 ? -shift : 0; j < N; j += t->BK) {
        double n = ceil((N - j < t->BK ? N - j : t->BK) / 16), plain = j >= 0 && j + t->BK <= N;
        if (backward)
            units += n * 7 * strips;
        else
            units += n * 2 * (plain ? ceil(t->T / t->strip) * t->strip / 16 : strips);
    }
    return units * 16 / t->BK;
}

/* The sweeps of the attention kernels. attention_sweeps writes the units of each sweep
   per batch row to `units` (persistent vectors count as part of the forward and key
   sweeps), and the bytes of dR that are written and read to *bytes. It returns the tile
   sizes of the forward or the backward pass. */
enum { SWEEP_FORWARD, SWEEP_QUERIES, SWEEP_KEYS, SWEEP_TABLE, SWEEP_DIAGONALS, SWEEPS };

static inline tiles attention_sweeps(const config *c, size_t l, int backward, double *units,
                                     double *bytes) {
    double S = window_of(c, l), capacity;
    int wide = !backward && c->span >= 512 && c->block >= 128 && c->dim / c->heads <= 64
               && (double)(c->batch * c->heads * ((c->block + 127) / 128)) >= 264;
    tiles t = tiles_of(c, S, 0, wide);
    size_t h, k;
    capacity = tiles_capacity(&t, (double)c->batch, (double)c->heads);
    *bytes = 0;
    for (k = 0; k < SWEEPS; k++) units[k] = 0;
    for (h = 0; h < c->heads; h++) {
        double keys = keys_of(c, l, h), width, before = 0;
        t.live = floor(keys < S ? keys : S);
        t.full = floor(span_of(c, l, h)) + 1 < t.live ? floor(span_of(c, l, h)) + 1 : t.live;
        width = tiles_width(&t, t.live);
        for (k = 0; k < c->heads; k++) { /* add up the columns of the narrower heads, which come
                                            first */
            double other = keys_of(c, l, k);
            other = tiles_width(&t, floor(other < S ? other : S));
            if (other < width || (other == width && k < h)) before += other;
        }
        if (!backward) {
            units[SWEEP_FORWARD] += tiles_forward(&t);
            continue;
        }
        units[SWEEP_QUERIES] += tiles_queries(&t);
        units[SWEEP_KEYS] += tiles_keys(&t);
        if (before + width <= capacity)
            units[SWEEP_TABLE] += tiles_table(&t);
        else
            units[SWEEP_DIAGONALS] += tiles_diagonals(&t);
        if (before + width <= capacity) *bytes += 4 * (double)c->batch * t.T * width;
    }
    units[backward ? SWEEP_KEYS : SWEEP_FORWARD] += (double)c->heads
                                                    * tiles_vectors(&t, (double)c->pers, backward);
    return t;
}

/* Returns the operations that the attention kernels of a layer execute in the forward
   pass (backward = 0) or the backward pass (backward = 1). */
static inline double attention_runs(const config *c, size_t l, int backward, double *bytes) {
    double units[SWEEPS], sum = 0;
    tiles t = attention_sweeps(c, l, backward, units, bytes);
    int k;
    for (k = 0; k < SWEEPS; k++) sum += units[k];
    return sum * (double)c->batch * 32 * t.BK * t.DP;
}

/* Returns the units of a full warp tile: for the table, the share of one of the four
   warps that compute 64 queries by t.columns; otherwise, a strip by BK keys. */
static inline double sweep_unit(const tiles *t, int sweep) {
    double wide = 1 + 16.0 / t->BK;
    switch (sweep) {
    case SWEEP_FORWARD: return t->strip / 16 * 3.0;
    case SWEEP_QUERIES: return 3 + 2 * wide;
    case SWEEP_KEYS: return 4 + wide;
    case SWEEP_TABLE: return t->columns / (double)t->BK;
    default: return 2 + 2 * wide;
    }
}

/* Changes the executed operations of the row `name` from `flop`, which the caller has
   added, to `run`, and adds the expected time. */
static inline void work_runs(work *w, const char *name, double run, double flop) {
    int i;
    for (i = 0; i < w->rows; i++)
        if (!strcmp(w->row[i].name, name)) {
            double t = 1e3 * run / (strstr(name, "backward") ? PLAN_BACKWARD : PLAN_FORWARD);
            w->row[i].run += run - flop;
            /* Memory traffic is not added: it overlaps with the operations and takes
               much less time. */
            w->row[i].plan += t;
        }
}

/* Adds the weight gradient dW (o,i), a sum over n rows. Slices are written here and
   read by the deferred sums, which add them to dW; a single slice is added directly.
   The expected rate of matmuls assumes a fully busy GPU, so it is scaled by the
   fraction of multiprocessors that the tiles keep busy. */
static inline void work_weight(work *w, const char *name, double n, double i, double o,
                               double used) {
    double pieces = work_pieces(o, i, n), scratch = pieces > 1 || used < o, flop = 2 * n * i * o,
           bytes = 2 * (n * i + n * o);
    int k;
    bytes += scratch > 0 ? 4 * pieces * i * o : 8 * i * o;
    work_add(w, name, MATMULS, 1, flop, bytes);
    for (k = 0; k < w->rows; k++)
        if (!strcmp(w->row[k].name, name)) {
            double a = flop / ROOF_FLOPS / PLAN_MATMULS, b = bytes / ROOF_BYTES / PLAN_BYTES,
                   busy = a / work_busy(o, i, pieces);
            w->row[k].plan += 1e3 * ((busy > b ? busy : b) - (a > b ? a : b));
        }
    w->cut += scratch;
    w->cut_bytes += scratch * 4 * pieces * i * o;
    w->cut_dw += scratch * 8 * i * used;
}

/* Adds y (n,o) = x (n,i) W^T and its backward pass: dx if n_dx > 0 (accumulated if
   `added` is 1), and dW in float. `used` of the o outputs are not padding. */
static inline void work_linear_padded(work *w, const char *fwd, const char *dx, const char *dw,
                                      double n, double i, double o, double n_dx, int added,
                                      double used) {
    int k;
    work_add(w, fwd, MATMULS, 1, 2 * n * i * o, 2 * (n * i + i * o + n * o));
    if (n_dx > 0)
        work_add(w, dx, MATMULS, 1, 2 * n_dx * i * o,
                 2 * (n_dx * o + i * o + (added ? 2 : 1) * n_dx * i));
    work_weight(w, dw, n, i, o, used);
    w->model_flop += 4 * n * i * used + 2 * n_dx * i * used;
    for (k = 0; k < w->rows; k++) { /* padding is executed, but not required */
        work_row *r = &w->row[k];
        if (!strcmp(r->name, fwd) || !strcmp(r->name, dw)) r->flop -= 2 * n * i * (o - used);
        if (!strcmp(r->name, dx)) r->flop -= 2 * n_dx * i * (o - used);
    }
}

static inline void work_linear(work *w, const char *fwd, const char *dx, const char *dw, double n,
                               double i, double o, double n_dx, int added) {
    work_linear_padded(w, fwd, dx, dw, n, i, o, n_dx, added, o);
}

/* Adds the work of one layer with a full memory. Every operand of a pass is counted
   once. */
static inline void work_layer(work *w, const config *c, size_t l) {
    double B = (double)c->batch, M = (double)c->block, N = B * M, d = (double)c->dim,
           f = (double)c->inner, L = (double)c->span, P = (double)c->pers, rows;
    double S = window_of(c, l), C = S + TRIM < L ? S + TRIM : L, pairs = 0,
           D = d / (double)c->heads, keys = N * d, window[3], heads[3];
    int g, groups = groups_of(c, l, window, heads);
    size_t h;
    for (h = 0; h < c->heads; h++) pairs += N * keys_of(c, l, h);
    work_add(w, "memory: rows move, all streams together", PASSES, 3, 0,
             2 * 2 * d * B * (C + M + S));
    work_linear(w, "Wq, Wk, Wv, Wo forward", "Wq, Wk, Wv, Wo backward, dx",
                "Wq, Wk, Wv, Wo backward, dW", N, d, 3 * d, N, 1);
    for (g = 0; g < groups; g++) {
        work_linear(w, "Wk, Wv of the memory forward", "", "Wk, Wv of the memory backward, dW",
                    B * window[g], d, 2 * D * heads[g], 0, 0);
        keys += B * window[g] * D * heads[g]; /* elements of k; v has as many */
    }
    if (groups > 1)
        work_add(w, "weights, rows by groups of heads", PASSES, 2, 0,
                 2 * d * d * (4 + 2 + 4 + 4 + 4));
    /* The memory rows of a group are copied together with the weights. If that takes
       more memory than the group saves, only the gradient of these rows is copied, by
       another node. */
    for (g = 1; g < groups; g++)
        work_add(w, "weights, rows by groups of heads", PASSES,
                 window[g] * d > (S - window[g]) * 2 * D * heads[g], 0, 4 * B * d * window[g]);
    work_linear(w, "Wq, Wk, Wv, Wo forward", "Wq, Wk, Wv, Wo backward, dx",
                "Wq, Wk, Wv, Wo backward, dW", N, d, d, N, 0);
    work_add(w, "attention forward", ATTENTION, 2, 6 * D * pairs + 4 * d * N * P,
             2 * (2 * N * d + 2 * keys) + 8 * N * (double)c->heads + 2 * S * D + 4 * P * d);
    work_add(w, "attention backward", ATTENTION, c->pers ? 6 : 5, 16 * D * pairs + 10 * d * N * P,
             2 * (4 * N * d + 4 * keys) + 8 * N * (double)c->heads + 10 * S * D + 12 * P * d);
    work_runs(w, "attention forward", attention_runs(c, l, 0, &rows),
              6 * D * pairs + 4 * d * N * P);
    work_runs(w, "attention backward", attention_runs(c, l, 1, &rows),
              16 * D * pairs + 10 * d * N * P);
    work_add(w, "attention backward", ATTENTION, 0, 0, rows);
    w->model_flop += 18 * D * pairs + 12 * d * N * P;
    work_add(w, "residual, LayerNorm forward", PASSES, c->pers ? 1 : 2, 0,
             (c->pers ? 1 : 2) * (2 * 4 * N * d + 8 * N));
    work_sums(w, N, d, c->pers ? 2 : 5, 32, 2048);
    work_add(w, "residual, LayerNorm backward", PASSES, c->pers ? 1 : 2, 0,
             (c->pers ? 1 : 2) * (2 * 4 * N * d + 8 * N));
    if (c->pers) return;
    work_linear(w, "W1, W2 forward", "W1, W2 backward, dx", "W1, W2 backward, dW", N, d, f, N, 0);
    work_linear(w, "W1, W2 forward", "W1, W2 backward, dx", "W1, W2 backward, dW", N, f, d, N, 0);
    work_sums(w, N, f, 1, 64, 1024);
    work_add(w, "bias, relu backward", PASSES, 1, 0, 2 * 3 * N * f);
}

static inline void work_count(work *w, const config *c) {
    double N = (double)c->batch * (double)c->block, d = (double)c->dim, V = (double)vocab_of(c),
           P = work_padded(V);
    size_t l;
    memset(w, 0, sizeof *w);
    work_add(w, "embedding", PASSES, 5, 0, N * d * 2 + N * d * 4 + N * d * 2 + V * d * 8);
    for (l = 0; l < c->layers; l++) work_layer(w, c, l);
    work_linear_padded(w, "output layer forward", "output layer backward, dx",
                       "output layer backward, dW", N, d, P, N, 0, V);
    work_add(w, "scalars: loss, spans, notes", PASSES, 5 + 2 * ceil((double)c->layers / 8), 0, 0);
    work_sums(w, N, P, 1, 64, 1024);
    work_sums_made(w);
    work_add(w, "cross entropy, output bias", PASSES, 4, 0,
             2 * (1 + 1) * N * V + 2 * (1 + 1) * N * P + 16 * N);
    work_add(w, "Adagrad: norms, update, gradients to 0", UPDATE, 3, 0, 30 * parameters(c));
}


// >>the other families: no dropout, memory full

enum { OF_XL, OF_COMPRESSIVE, OF_SUPERNET };

typedef struct family {
    const char *name, *what;
    int kind;
    size_t layers, dim, inner, heads, block, memory, cmem, batch, vocab;
    size_t remember; /* number of layers with a memory */
} family;

static const family families[] = {
    {"xl", "Transformer-XL 12x512, 512 + 512", OF_XL, 12, 512, 2048, 8, 512, 512, 0, 22, 256, 12},
    {"compressive", "Compressive Transformer 12x512, GRU gates, GLU, 1024 + 1024 + 256",
     OF_COMPRESSIVE, 12, 512, 2048, 8, 1024, 1024, 256, 16, 256, 7},
    {"compressive 1", "the same, one stream", OF_COMPRESSIVE, 12, 512, 2048, 8, 1024, 1024, 256, 1,
     256, 7},
    {"par search", "PAR's supernet, 6 mixtures of 128 (512), 32 + 16", OF_SUPERNET, 6, 128, 512, 4,
     32, 16, 0, 32, 205, 6},
    {"par found", "PAR, (sf)3 of 128 (512), 32 + 16", OF_XL, 3, 128, 512, 4, 32, 16, 0, 32, 205,
     3}};

enum { FAMILIES = sizeof families / sizeof *families };

/* How a bias gradient is summed: not at all, by a separate pass, or by the pass that
   follows. */
enum { BIAS_NONE, BIAS_OWN, BIAS_AFTER };

enum { ACT_NONE, ACT_RELU };

static inline void more_linear_padded(work *w, double n, double i, double o, double n_dx, int bias,
                                      int act, double used) {
    work_linear_padded(w, "matmuls forward", "matmuls backward, dx", "matmuls backward, dW", n,
                       i, o, n_dx, 1, used);
    if (bias == BIAS_OWN)
        work_add(w, "bias, activation backward", PASSES, 1, 0, 2 * (act ? 3 : 1) * n * o);
    if (bias) work_sums(w, n, o, 1, 64, 1024);
}

static inline void more_linear(work *w, double n, double i, double o, double n_dx, int bias,
                               int act) {
    more_linear_padded(w, n, i, o, n_dx, bias, act, o);
}

static inline void more_norm(work *w, double n, double d, int residual) {
    work_add(w, "LayerNorm forward", PASSES, 1, 0, 2 * (residual ? 4 : 2) * n * d + 8 * n);
    work_add(w, "LayerNorm backward", PASSES, 1, 0, 2 * 4 * n * d + 8 * n);
    work_sums(w, n, d, 2, 32, 2048);
}

static inline void more_copy(work *w, double nodes, double elements) {
    work_add(w, "memory: copies", PASSES, nodes, 0, 2 * 2 * elements);
}

/* Adds the work of one attention. With place = 1, it is causal, over the block and the
   C keys before it, with positions, which require one more matmul. In Transformer-XL,
   positions have biases, and the gradient of the positions does not belong to a
   parameter. With place = 0, it is not causal, over C keys, without positions. With
   back = 0, there is no backward pass. */
static inline void more_attention(work *w, const family *f, double T, double C, int place,
                                  int back) {
    double B = (double)f->batch, d = (double)f->dim, H = (double)f->heads, D = d / H, N = B * T,
           S = place ? C + T : C;
    double pairs = N * H * (place ? C + (T + 1) / 2 : C),
           channels = f->kind == OF_COMPRESSIVE ? D : d, P = place ? S * channels : 0;
    int xl = place && f->kind != OF_COMPRESSIVE;
    tiles t;
    memset(&t, 0, sizeof t);
    t.T = T;
    t.C = place ? C : 0;
    t.S = S;
    t.live = t.full = t.span = S;
    t.D = (int)D;
    t.DP = tiles_channels(D);
    t.strip = S >= 512 && T >= 128 && D <= 64 && B * H * ceil(T / 128) >= 264 ? 32 : 16;
    t.BQ = 4 * t.strip;
    t.BK = t.DP <= 64 ? 64 : 32;
    work_add(w, "attention forward", ATTENTION, place ? 2 : 3, (place ? 6 : 4) * D * pairs,
             2 * (2 * N * d + 2 * B * S * d) + 8 * N * H + 2 * P);
    work_runs(w, "attention forward",
              place ? B * H * tiles_forward(&t) * 32 * t.BK * t.DP : 4 * D * pairs,
              (place ? 6 : 4) * D * pairs);
    w->model_flop += (place ? 6 : 4) * D * pairs;
    if (!back) return;
    t.strip = 16;
    t.BQ = 64;
    if (xl) work_add(w, "gradients of positions to 0", PASSES, 1, 0, 2 * P);
    work_add(w, "attention backward", ATTENTION, place ? 5 : 3, (place ? 16 : 8) * D * pairs,
             2 * (4 * N * d + 4 * B * S * d) + 8 * N * H + 10 * P);
    work_runs(w, "attention backward",
              place ? B * H * (tiles_queries(&t) + tiles_keys(&t) + tiles_diagonals(&t)) * 32 * t.BK
                          * t.DP
                    : 8 * D * pairs,
              (place ? 16 : 8) * D * pairs);
    w->model_flop += (place ? 12 : 6) * D * pairs;
}

static inline void more_gru(work *w, double n, double d) {
    more_linear(w, n, d, 3 * d, n, BIAS_AFTER, ACT_NONE);
    more_linear(w, n, d, 3 * d, n, BIAS_AFTER, ACT_NONE);
    work_add(w, "gates", PASSES, 2, 0, 2 * (8 + 15) * n * d);
}

/* Adds the work of an attention layer of Transformer-XL. The bias of Wo is added by the
   residual sum that follows. */
static inline void more_xl_attention(work *w, const family *f) {
    double B = (double)f->batch, T = (double)f->block, C = (double)f->memory, d = (double)f->dim,
           N = B * T;
    more_copy(w, 3, B * d * (C + C + (C < T ? C : T)));
    more_linear(w, N, d, 3 * d, N, BIAS_NONE, ACT_NONE);
    more_linear(w, B * C, d, 2 * d, 0, BIAS_NONE, ACT_NONE);
    more_linear(w, C + T, d, d, 0, BIAS_NONE, ACT_NONE);
    more_attention(w, f, T, C, 1, 1);
    more_linear(w, N, d, d, N, BIAS_NONE, ACT_NONE);
}

static inline void more_layer(work *w, const family *f, int remembers) {
    double B = (double)f->batch, T = (double)f->block, M = remembers ? (double)f->memory : 0,
           Z = remembers ? (double)f->cmem : 0, d = (double)f->dim, F = (double)f->inner, N = B * T;
    switch (f->kind) {
    case OF_XL:
        more_xl_attention(w, f);
        more_norm(w, N, d, 1);
        more_linear(w, N, d, F, N, BIAS_OWN, ACT_RELU);
        more_linear(w, N, F, d, N, BIAS_NONE, ACT_NONE);
        more_norm(w, N, d, 1);
        break;
    case OF_SUPERNET:
        more_xl_attention(w, f);
        more_linear(w, N, d, F, N, BIAS_OWN, ACT_RELU);
        more_linear(w, N, F, d, N, BIAS_OWN, ACT_NONE);
        work_add(w, "gates", PASSES, 2 + 2, 0, 0);
        work_add(w, "mixtures", PASSES, 1 + 3, 0, 2 * (4 + 7) * N * d);
        break;
    default:
        more_norm(w, N, d, 0);
        /* both memories are copied into one array */
        if (remembers) more_copy(w, 1, B * d * (M + Z));
        more_linear(w, N, d, 3 * d, N, BIAS_NONE, ACT_NONE);
        if (remembers) more_linear(w, B * (M + Z), d, 2 * d, 0, BIAS_NONE, ACT_NONE);
        more_attention(w, f, T, M + Z, 1, 1);
        more_linear(w, N, d, d, N, BIAS_OWN, ACT_NONE);
        more_gru(w, N, d);
        more_norm(w, N, d, 0);
        more_linear(w, N, d, 2 * F, N, BIAS_AFTER, ACT_NONE);
        work_add(w, "gelu, multiplied halves forward", PASSES, 1, 0, 2 * (2 + 1) * N * F);
        work_add(w, "gelu, multiplied halves backward", PASSES, 1, 0, 2 * (1 + 2 + 2) * N * F);
        more_linear(w, N, F, d, N, BIAS_OWN, ACT_NONE);
        more_gru(w, N, d);
        if (!remembers) break;
        /* Evicted rows are compressed 4 to 1. The auxiliary loss compares attention
           over the compressed rows with attention over the original rows. The rows of a
           group are copied to one array, and both memories move. */
        more_copy(w, 3, B * d * (T + T + Z));
        more_linear(w, N / 4, 4 * d, d, 0, BIAS_OWN, ACT_NONE);
        /* these matmuls have constant weights, so there is no dW */
        work_add(w, "matmuls forward", MATMULS, 1, N * d * d, 2 * (N / 4 * 3 * d + 2 * d * d));
        work_add(w, "matmuls backward, dx", MATMULS, 1, N * d * d,
                 2 * (N / 4 * 3 * d + 2 * d * d));
        w->model_flop += 2 * N * d * d;
        more_attention(w, f, T, T / 4, 0, 1);
        more_attention(w, f, T, T, 0, 0);
        work_add(w, "distance", PASSES, 3, 0, 2 * (2 + 3) * N * d);
    }
}

static inline double family_parameters(const family *f) {
    double d = (double)f->dim, F = (double)f->inner, L = (double)f->layers, r = (double)f->remember,
           V = (double)f->vocab;
    double layer = f->kind == OF_COMPRESSIVE ? 4 * d * d + 3 * d * F + 12 * d * d + 2 * F + 15 * d
                                             : 5 * d * d + 2 * d * F + F + 8 * d;
    double more = f->kind == OF_COMPRESSIVE
                      ? r * (4 * d * d + d)
                            + (double)(f->block + f->memory + f->cmem) * d / (double)f->heads
                      : 0;
    return L * layer + more + (f->kind == OF_COMPRESSIVE ? 2 : 1) * V * d + V;
}

static inline void family_count(work *w, const family *f) {
    double N = (double)f->batch * (double)f->block, d = (double)f->dim, V = (double)f->vocab,
           P = work_padded(V);
    size_t l;
    memset(w, 0, sizeof *w);
    work_add(w, "embedding", PASSES, 5, 0, N * d * 2 + N * d * 4 + N * d * 2 + V * d * 8);
    for (l = 0; l < f->layers; l++) more_layer(w, f, l < f->remember);
    more_linear_padded(w, N, d, P, N, BIAS_OWN, ACT_NONE, V);
    work_add(w, "scalars: loss, notes", PASSES, 5, 0, 0);
    /* auxiliary losses */
    if (f->kind == OF_COMPRESSIVE)
        work_add(w, "scalars: loss, notes", PASSES, 2 * ceil((double)f->remember / 8), 0, 0);
    work_sums_made(w);
    work_add(w, "cross entropy", PASSES, 3, 0, 2 * (1 + 1) * N * V + 2 * N * P + 16 * N);
    work_add(w, "norms, update, gradients to 0", UPDATE, 3, 0, 30 * family_parameters(f));
}

/* The quantities that work_sum can add up. WORK_PLAN includes the time per node. */
enum { WORK_FLOP, WORK_BYTES, WORK_MS, WORK_RUN, WORK_NODES, WORK_PLAN };

static inline double work_value(const work_row *r, int what) {
    switch (what) {
    case WORK_FLOP: return r->flop;
    case WORK_BYTES: return r->bytes;
    case WORK_MS: return r->ms;
    case WORK_RUN: return r->run;
    case WORK_NODES: return r->calls;
    default: return r->plan + 1e-3 * PLAN_NODE * r->calls;
    }
}

/* Returns the sum of the quantity `what` over the rows of a group, or over all rows if
   group < 0. */
static inline double work_sum(const work *w, int group, int what) {
    double sum = 0;
    int i;
    for (i = 0; i < w->rows; i++)
        if (group < 0 || w->row[i].group == group) sum += work_value(&w->row[i], what);
    return sum;
}
#endif
