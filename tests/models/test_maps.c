/* test_maps.c - attention maps of all families: weights times values against the fused
   kernel for random forms of attention and for models with memory, dropout and groups of
   heads; kinds and tokens of the keys; spans and states as arrays; errors. The golden
   tests check the maps of their models. */
#include <stdint.h>
#include "../../seqtx_attn_span.h"
#include "../../seqtx_compressive.h"
#include "../../seqtx_par.h"
#include "../../seqtx_sru.h"
#include "family.h"
#include "maps.h"

enum { V = 19 };

static size_t below(size_t n) {
    const size_t i = (size_t)((test_rand() + 1) / 2 * (double)n);
    return i < n ? i : n - 1;
}

/* Returns 1 with probability 1/n. */
static int once_in(size_t n) {
    return below(n) == 0;
}

/* Returns a random constant. */
static stx_tensor *constant(stx_ctx *x, size_t d0, size_t d1, size_t d2) {
    stx_real *v = random_values(d0 * (d1 ? d1 : 1) * (d2 ? d2 : 1));
    stx_tensor *t = stx_input(x, v, d0, d1, d2, 0);
    free(v);
    return t;
}

/* Returns a mask (B,S) with about a quarter of its keys missing. */
static const stx_ids *mask(stx_ctx *x, size_t B, size_t S) {
    int32_t *v = (int32_t *)malloc(B * S * sizeof *v);
    const stx_ids *ids;
    size_t i;
    for (i = 0; i < B * S; i++) v[i] = once_in(4);
    ids = stx_tokens(x, v, B, S);
    free(v);
    return ids;
}

/* Sets the queries, keys and values in one of the forms of stx_attention_in. */
static void random_keys(stx_ctx *x, stx_attention_in *a, size_t B, size_t T, size_t S, size_t C) {
    switch (below(S > T ? 4 : 3)) {
    case 0:
        a->q = constant(x, B, T, C);
        a->k = constant(x, B, S, C);
        a->v = constant(x, B, S, C);
        break;
    case 1:
        a->q = constant(x, B, T, C);
        a->kv = constant(x, B, S + 3, 2 * C);
        a->kv_first = 2;
        a->kv_rows = S;
        break;
    case 2:
        a->q = constant(x, B, T, C);
        a->kv = constant(x, B, S, 2 * C);
        break;
    default:
        a->qkv = constant(x, B, T, 3 * C);
        a->cached[0] = constant(x, B, S - T, 2 * C);
    }
}

static void random_form(stx_ctx *x, int train) {
    const size_t B = 1 + below(3), T = 1 + below(6), S = T + below(8), H = 1 + below(3);
    const size_t D = 4, C = H * D;
    stx_attention_in a;
    stx_attention_desc d;
    stx_attention_record record = {NULL, 0, 0};
    size_t b, h;
    stx_real z[3];
    memset(&a, 0, sizeof a);
    memset(&d, 0, sizeof d);
    stx_begin(x, train ? STX_TRAIN : STX_EVAL);
    d.heads = H;
    d.dropout = train ? 0.4 : 0;
    d.scale = once_in(2) ? 0.7 : 0;
    random_keys(x, &a, B, T, S, C);
    if (once_in(3)) a.pad = mask(x, B, S);
    if (once_in(3)) {
        a.persistent_k = constant(x, H, 3, D);
        a.persistent_v = constant(x, H, 3, D);
    }
    if (once_in(3)) a.content_bias = constant(x, C, 0, 0);
    d.not_causal = !a.cached[0] && once_in(4);
    if (!d.not_causal) {
        d.delta_min = once_in(2);
        if (once_in(2)) d.span = 1 + below(S + 2);
        d.first_key = (ptrdiff_t)below(7) - 4;
        if (once_in(2)) {
            a.pe = constant(x, 3 + below(S + 5), once_in(2) ? D : C, 0);
            if (once_in(2)) a.position_bias = constant(x, C, 0, 0);
        }
        if (once_in(2)) {
            for (h = 0; h < 3; h++) z[h] = (stx_real)(0.5 * (test_rand() + 1));
            a.span_fraction = stx_input(x, z, once_in(3) ? 1 : H, 0, 0, 0);
            d.max_span = 1 + (double)below(S + 3);
            d.ramp = 1 + (double)below(4);
            d.no_renorm = once_in(3);
            if (!d.no_renorm && once_in(3)) d.eps = 0.1;
        }
    }

    a.record = &record;
    CHECK(stx_attention(x, &a, &d) != NULL, "%s", stx_error(x));
    for (b = 0; b < B && stx_ok(x); b++) {
        const stx_attention_map *map = stx_attention_map_of(x, "test", &record, b);
        check_map(x, "random form", 0, b, &record, map);
        if (!map || !a.span_fraction) continue;
        CHECK(map->span && CLOSE(map->ramp, d.ramp, 1e-6), "no spans");
        for (h = 0; h < H; h++)
            CHECK(CLOSE(map->span[h], (double)z[a.span_fraction->size == H ? h : 0] * d.max_span,
                        1e-6), "span %g", map->span[h]);
    }
    stx_clear_error(x);
}

static void random_forms(void) {
    stx_ctx *x = context(1, 3);
    int i;
    for (i = 0; i < 400; i++) random_form(x, i % 4 == 3);
    stx_destroy(x);
}

/* Reads a text (2,n) in segments with a memory, and checks all maps of each. A stream is
   reset in the middle. */
static void segments(stx_lm lm, const stx_attention_record *(*record)(const stx_lm *, size_t),
                     const char *what, int mode, size_t T) {
    enum { B = 2, STEPS = 6 };
    const size_t n = STEPS * T + 1;
    int32_t *text = random_tokens(B, n, V, 5);
    void *s = lm.state_create(lm.model, B, 0);
    size_t i, l, b, maps = 0;
    CHECK(s != NULL, "%s: %s", what, stx_error(lm.ctx));
    for (i = 0; s && i < STEPS && stx_ok(lm.ctx); i++) {
        stx_ids *in, *out;
        if (i == 3) lm.state_reset_stream(s, 1);
        stx_begin(lm.ctx, mode);
        in = token_block(lm.ctx, text, B, n, i * T, T);
        out = token_block(lm.ctx, text, B, n, i * T + 1, T);
        lm.loss(lm.model, in, out, s, s);
        for (l = 0; l < lm.layers; l++)
            for (b = 0; b < B; b++) {
                const stx_attention_map *map = lm.attention_map(lm.model, l, b);
                if (map) check_map(lm.ctx, what, l, b, record(&lm, l), map);
                maps += map != NULL;
                if (map && i == 3 && b == 1 && map->count[STX_KEY_MEMORY])
                    CHECK(map->key[map->count[STX_KEY_ZERO]].missing
                              || map->count[STX_KEY_ZERO] > 0 || !strcmp(what, "span, zeros"),
                          "%s: the rows of a reset stream exist", what);
            }
    }
    CHECK(maps >= STEPS * B && stx_ok(lm.ctx), "%s: %zu maps, %s", what, maps, stx_error(lm.ctx));
    free(text);
}

static const stx_attention_record *span_record(const stx_lm *lm, size_t l) {
    return &((const stx_span *)lm->model)->attended[l];
}

static const stx_attention_record *comp_record(const stx_lm *lm, size_t l) {
    return &((const stx_comp *)lm->model)->attended[l].call;
}

static const stx_attention_record *par_record(const stx_lm *lm, size_t l) {
    return &((const stx_par *)lm->model)->attended[l];
}

static const stx_attention_record *sru_record(const stx_lm *lm, size_t l) {
    return &((const stx_sru_lm *)lm->model)->sru->attended[l];
}

static stx_span_desc span_desc(int k) {
    stx_span_desc d;
    memset(&d, 0, sizeof d);
    d.vocab = V;
    d.layers = 2;
    d.dim = 16;
    d.heads = 2;
    d.span = 20;
    d.ramp = 3;
    d.adapt_span = k != 1;
    d.pers = k == 2 ? 5 : 0;
    d.no_renorm = k == 3;
    d.literal = k == 4 ? STX_SPAN_LITERAL : 0;
    d.span_per_layer = k == 5;
    d.dropout = 0.3;
    return d;
}

static void span_models(void) {
    static const char *const names[] = {"span", "span, fixed", "span, persistent",
                                        "span, not renormalised", "span, zeros",
                                        "span, per layer"};
    int k, mode;
    for (k = 0; k < 6; k++)
        for (mode = STX_EVAL; mode <= STX_TRAIN; mode++) {
            stx_ctx *x = context(1, 1);
            stx_span_desc d = span_desc(k);
            stx_span *m = stx_span_create(x, &d);
            double spans[4];
            size_t l, h;
            perturb(x, m->params);
            stx_span_clamp(m);
            segments(stx_span_as_lm(m), span_record, names[k], mode, 7);
            stx_span_head_spans(m, spans);
            for (l = 0; l < 2; l++)
                for (h = 0; h < 2; h++)
                    CHECK(spans[l * 2 + h] == stx_span_head_span(m, l, h)
                              && (k != 1 || spans[l * 2 + h] == 20), "span %g", spans[l * 2 + h]);
            stx_destroy(x);
        }
}

/* Groups of heads with caches of different length. */
static void grouped_heads(void) {
    enum { B = 4, T = 8, L = 800, H = 4 };
    stx_ctx *x = context(1, 1);
    int32_t *text = random_tokens(B, L + T, V, 9);
    const stx_attention_map *map;
    stx_span_desc d;
    stx_span *m;
    stx_span_state *s;
    size_t b;
    memset(&d, 0, sizeof d);
    d.vocab = V;
    d.layers = 1;
    d.dim = 16;
    d.heads = H;
    d.span = L;
    d.ramp = 4;
    d.adapt_span = 1;
    m = stx_span_create(x, &d);
    m->layer[0].z->data[2] = 1;
    s = stx_span_state_create(m, B);
    stx_begin(x, STX_EVAL);
    stx_span_forward(m, token_block(x, text, B, L + T, 0, L), s, s);
    stx_begin(x, STX_EVAL);
    stx_span_forward(m, token_block(x, text, B, L + T, L, T), s, s);
    CHECK(m->attended[0].args && m->attended[0].args->groups > 1, "one group");
    for (b = 0; b < B; b++) {
        map = stx_span_attention_map(m, 0, b);
        check_map(x, "groups", 0, b, &m->attended[0], map);
        CHECK(map && map->count[STX_KEY_MEMORY] == L && map->span[2] == L && map->span[1] == 0
                  && map->key[0].first == -L && map->key[L + 3].first == 3
                  && map->key[L + 3].kind == STX_KEY_SEGMENT,
              "the keys of groups");
    }
    free(text);
    stx_destroy(x);
}

static void comp_model(stx_ctx *x, int mode) {
    stx_comp_desc d;
    stx_comp *m;
    memset(&d, 0, sizeof d);
    d.vocab = V;
    d.layers = 2;
    d.dim = 16;
    d.heads = 2;
    d.segment = 6;
    d.ratio = 2;
    d.positions = STX_COMP_POSITIONS_XL;
    d.attn_dropout = 0.3;
    m = stx_comp_create(x, &d);
    perturb(x, m->params);
    segments(stx_comp_as_lm(m), comp_record, "compressive", mode, 6);
}

static void par_model(stx_ctx *x, int mode) {
    stx_par_desc d;
    stx_par *m;
    memset(&d, 0, sizeof d);
    d.vocab = V;
    d.dim = 16;
    d.heads = 2;
    d.head_dim = 8;
    d.pattern = "sfs";
    d.segment = d.mem = 7;
    d.attn_dropout = 0.3;
    m = stx_par_create(x, &d);
    perturb(x, m->params);
    segments(stx_par_as_lm(m), par_record, "par", mode, 7);
    CHECK(!stx_par_attention_map(m, 1, 0) && stx_ok(x), "feed-forward block: %s", stx_error(x));
}

static void sru_model(stx_ctx *x, int mode) {
    stx_sru_lm_desc d;
    stx_sru_lm *m;
    memset(&d, 0, sizeof d);
    d.vocab = V;
    d.dim = 16;
    d.sru.layers = 3;
    d.sru.heads = 2;
    d.sru.attention_last = 2;
    d.sru.transform = STX_SRU_ATTENTION;
    d.sru.attn_dropout = 0.3;
    m = stx_sru_lm_create(x, &d);
    perturb(x, m->params);
    segments(stx_sru_as_lm(m), sru_record, "sru", mode, 7);
    CHECK(!stx_sru_attention_map(m->sru, 0, 0) && stx_ok(x), "layer without attention: %s",
          stx_error(x));
}

static void other_models(void) {
    static void (*const model[])(stx_ctx *x, int mode) = {comp_model, par_model, sru_model};
    int k, mode;
    for (k = 0; k < 3; k++)
        for (mode = STX_EVAL; mode <= STX_TRAIN; mode++) {
            stx_ctx *x = context(1, 1);
            model[k](x, mode);
            CHECK(stx_ok(x), "%s", stx_error(x));
            stx_destroy(x);
        }
}

/* A memory that is simulated token by token: rows of the compressed memory with the
   positions that they stand for. */
enum { MOST_ROWS = 64 };

typedef struct simulated {
    long comp[MOST_ROWS][2], mem[MOST_ROWS];    /* first token and number; -1: missing */
    size_t c, n;
} simulated;

/* Reads a segment of S tokens that begins at `now`. */
static void simulate(simulated *s, const stx_comp_desc *d, size_t M, size_t C, long now) {
    const size_t e = s->n + d->segment > M ? s->n + d->segment - M : 0;
    const size_t zeros = d->literal & STX_COMP_LITERAL_PAD ? e % d->ratio : 0;
    size_t i, G = (e + d->ratio - 1) / d->ratio;
    long all[2 * MOST_ROWS];
    if (d->literal & STX_COMP_LITERAL_PAD) G = (e + zeros) / d->ratio;
    for (i = 0; i < s->n; i++) all[i] = s->mem[i];
    for (i = 0; i < d->segment; i++) all[s->n + i] = now + (long)i;
    for (i = 0; i < G; i++) {
        const size_t from = i ? i * d->ratio - zeros : 0;
        const size_t to = (i + 1) * d->ratio - zeros < e ? (i + 1) * d->ratio - zeros : e;
        s->comp[s->c][0] = all[from];
        s->comp[s->c++][1] = (long)(to - from);
    }
    if (s->c > C) {
        memmove(s->comp, s->comp + s->c - C, C * sizeof *s->comp);
        s->c = C;
    }
    s->n = s->n + d->segment - e;
    for (i = 0; i < s->n; i++) s->mem[i] = all[e + i];
}

static void compressed_tokens(size_t S, size_t M, size_t C, size_t ratio, unsigned literal,
                              size_t known) {
    stx_ctx *x = context(1, 1);
    stx_comp_desc d;
    stx_comp *m;
    stx_comp_state *state;
    simulated s;
    int32_t text[16] = {0};
    size_t i, j, l, compared = 0;
    memset(&d, 0, sizeof d);
    memset(&s, 0, sizeof s);
    d.dim = 8;
    d.vocab = V;
    d.layers = 1;
    d.heads = 1;
    d.segment = S;
    d.mem = M;
    d.cmem = C;
    d.ratio = ratio;
    d.literal = literal;
    m = stx_comp_create(x, &d);
    state = stx_comp_state_create(m, 1);
    for (i = 0; i < 12; i++) {
        const long now = (long)(i * S);
        const stx_attention_map *map;
        stx_begin(x, STX_EVAL);
        stx_comp_forward(m, stx_tokens(x, text, 1, S), NULL, state, state);
        map = stx_comp_attention_map(m, 0, 0);
        CHECK(map && map->count[STX_KEY_COMPRESSED] == s.c && map->count[STX_KEY_MEMORY] == s.n
                  && map->count[STX_KEY_SEGMENT] == S,
              "S %zu, M %zu, C %zu, r %zu, step %zu: keys %s", S, M, C, ratio, i, stx_error(x));
        for (j = 0; map && j < s.c; j++) {
            const stx_attention_key *key = &map->key[j];
            l = s.c - j;    /* rows from here to the newest */
            if (l > known && !key->tokens) continue;
            CHECK(key->kind == STX_KEY_COMPRESSED && !key->missing
                      && (long)key->first == s.comp[j][0] - now
                      && (long)key->tokens == s.comp[j][1],
                  "S %zu, M %zu, C %zu, r %zu, step %zu, row %zu: tokens %ld + %zu, expected "
                  "%ld + %ld", S, M, C, ratio, i, j, (long)key->first, key->tokens,
                  s.comp[j][0] - now, s.comp[j][1]);
            compared++;
        }
        for (j = 0; map && j < s.n; j++)
            CHECK(map->key[s.c + j].kind == STX_KEY_MEMORY
                      && (long)map->key[s.c + j].first == s.mem[j] - now, "memory row %zu", j);
        simulate(&s, &m->desc, M, C, now);
    }
    CHECK(compared > 20 && stx_ok(x), "%zu rows compared, %s", compared, stx_error(x));
    stx_destroy(x);
}

/* In a stream that began later, rows from before its beginning are missing, and the
   others stand for its own tokens. */
static void tokens_after_reset(void) {
    enum { S = 5, B = 2 };
    stx_ctx *x = context(1, 1);
    stx_comp_desc d;
    stx_comp *m;
    stx_comp_state *state;
    simulated s;
    int32_t text[B * S] = {0};
    size_t i, j;
    memset(&d, 0, sizeof d);
    memset(&s, 0, sizeof s);
    d.dim = 8;
    d.vocab = V;
    d.layers = 1;
    d.heads = 1;
    d.segment = S;
    d.mem = 10;
    d.cmem = 6;
    d.ratio = 2;
    m = stx_comp_create(x, &d);
    state = stx_comp_state_create(m, B);
    for (i = 0; i < 8; i++) {
        const long now = (long)(i * S);
        const stx_attention_map *map;
        if (i == 3) {
            stx_comp_state_reset_stream(state, 1);
            memset(&s, 0, sizeof s);
        }
        stx_begin(x, STX_EVAL);
        stx_comp_forward(m, stx_tokens(x, text, B, S), NULL, state, state);
        map = stx_comp_attention_map(m, 0, 1);
        CHECK(map && map->count[STX_KEY_COMPRESSED] >= s.c, "%s", stx_error(x));
        for (j = 0; map && j < map->count[STX_KEY_COMPRESSED]; j++) {
            const stx_attention_key *key = &map->key[j];
            const size_t before = map->count[STX_KEY_COMPRESSED] - s.c;
            if (j < before) {
                CHECK(key->missing && !key->tokens, "step %zu: row %zu exists", i, j);
                continue;
            }
            CHECK(!key->missing && (long)key->first == s.comp[j - before][0] - now
                      && (long)key->tokens == s.comp[j - before][1],
                  "step %zu, row %zu: tokens %ld + %zu, expected %ld + %ld", i, j,
                  (long)key->first, key->tokens, s.comp[j - before][0] - now,
                  s.comp[j - before][1]);
        }
        simulate(&s, &m->desc, d.mem, d.cmem, now);
    }
    stx_destroy(x);
}

/* The states of SRU++ as arrays. */
static void sru_states(void) {
    enum { B = 2, T = 5 };
    stx_ctx *x = context(1, 1);
    int32_t *text = random_tokens(B, T, V, 2);
    stx_sru_lm_desc d;
    stx_sru_lm *m;
    stx_sru_state *s;
    stx_real c[B * 16], memory[B * T * 16];
    size_t l, b, i;
    memset(&d, 0, sizeof d);
    d.vocab = V;
    d.dim = 16;
    d.sru.layers = 2;
    d.sru.attention_last = 1;
    d.sru.transform = STX_SRU_ATTENTION;
    m = stx_sru_lm_create(x, &d);
    s = stx_sru_state_create(m->sru, B);
    stx_begin(x, STX_EVAL);
    stx_sru_lm_forward(m, stx_tokens(x, text, B, T), s, s);
    for (l = 0; l < 2; l++) {
        const stx_memory_layer *y = &s->memory->layer[l];
        CHECK(stx_sru_state_get(s, l, c, NULL) && !memcmp(c, s->c + l * B * 16, sizeof c),
              "states of layer %zu", l);
        memory[0] = 99;
        CHECK(stx_sru_state_get(s, l, NULL, memory), "%s", stx_error(x));
        CHECK(y->count == (l ? T : 0) && (l || memory[0] == 99), "layer %zu: %zu rows", l,
              y->count);
        for (b = 0; b < B; b++)
            for (i = 0; l && i < T * 16; i++)
                CHECK(memory[b * T * 16 + i] == y->data[b * y->stride + i], "memory");
    }
    CHECK(!stx_sru_state_get(s, 2, c, NULL)
              && test_says(stx_error(x), "stx_sru_state_get: expected a layer below 2, got 2"),
          "%s", stx_error(x));
    stx_clear_error(x);
    stx_sru_state_reset_stream(s, 1);
    CHECK(!stx_sru_state_get(s, 1, NULL, memory)
              && test_says(stx_error(x), "stx_sru_state_get: some streams lack rows in layer 1"),
          "%s", stx_error(x));
    stx_clear_error(x);
    CHECK(stx_sru_state_get(s, 1, c, NULL) && !stx_sru_state_get(NULL, 0, c, NULL), "states");
    free(text);
    stx_destroy(x);
}

/* Checks that a map fails with this error, and clears it. */
static void refused(stx_ctx *x, const stx_attention_map *map, const char *says) {
    CHECK(!map && test_says(stx_error(x), says), "expected '%s', got '%s'", says, stx_error(x));
    stx_clear_error(x);
}

static void errors(void) {
    stx_ctx *x = context(1, 1);
    stx_span_desc d = span_desc(0);
    stx_span *m;
    stx_tensor *nll;
    stx_comp_desc cd;
    stx_comp *comp;
    stx_par_desc pd;
    stx_sru_desc sd;
    int32_t text[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    memset(&cd, 0, sizeof cd);
    memset(&pd, 0, sizeof pd);
    memset(&sd, 0, sizeof sd);
    d.recompute_layers = 1;
    m = stx_span_create(x, &d);
    stx_begin(x, STX_EVAL);
    refused(x, stx_span_attention_map(m, 0, 0),
            "stx_span_attention_map: expected a forward pass with attention since the last");
    stx_span_forward(m, stx_tokens(x, text, 1, 8), NULL, NULL);
    CHECK(stx_span_attention_map(m, 1, 0) != NULL, "%s", stx_error(x));
    refused(x, stx_span_attention_map(m, 2, 0), "stx_span_attention_map: .. layer below 2, got 2");
    refused(x, stx_span_attention_map(m, 0, 1),
            "stx_span_attention_map: expected a stream below B = 1, got 1");
    stx_begin(x, STX_EVAL);
    refused(x, stx_span_attention_map(m, 0, 0), "stx_span_attention_map: expected a forward pass");

    /* layer 1 is recomputed, layer 0 is not */
    stx_begin(x, STX_TRAIN);
    nll = stx_span_loss(m, stx_tokens(x, text, 1, 7), stx_tokens(x, text + 1, 1, 7), NULL, NULL);
    CHECK(stx_span_attention_map(m, 0, 0) != NULL, "%s", stx_error(x));
    refused(x, stx_span_attention_map(m, 1, 0), "stx_span_attention_map: .. STX_EVAL");
    stx_backward(x, nll);
    check_map(x, "after backward", 0, 0, &m->attended[0], stx_span_attention_map(m, 0, 0));
    refused(x, stx_span_attention_map(m, 1, 0), "stx_span_attention_map: .. recompute_layers");
    CHECK(!stx_span_attention_map(NULL, 0, 0) && !stx_comp_attention_map(NULL, 0, 0)
              && !stx_par_attention_map(NULL, 0, 0) && !stx_sru_attention_map(NULL, 0, 0),
          "maps without a model");
    CHECK(!stx_attention_host(x, m->attended[0].args, 1) && !stx_ok(x), "row 1 of 1");
    stx_clear_error(x);

    cd.layers = 1;
    cd.dim = 8;
    cd.heads = 1;
    comp = stx_comp_create(x, &cd);
    refused(x, stx_comp_attention_map(comp, 1, 0), "stx_comp_attention_map: .. below 1, got 1");
    refused(x, stx_comp_attention_map(comp, 0, 0), "stx_comp_attention_map: expected a forward");
    pd.dim = 8;
    pd.heads = 1;
    pd.pattern = "s";
    refused(x, stx_par_attention_map(stx_par_create(x, &pd), 1, 0),
            "stx_par_attention_map: expected a block below 1, got 1");
    sd.input = sd.hidden = 8;
    sd.layers = 1;
    refused(x, stx_sru_attention_map(stx_sru_create(stx_params_create(x), "", &sd), 1, 0),
            "stx_sru_attention_map: expected a layer below 1, got 1");
    stx_destroy(x);
}

/* Memory that runs out at any allocation. Several maps fill the memory of the step. */
static void without_memory(void) {
    int32_t text[64] = {1, 2, 3, 4, 5, 6, 7, 8};
    const stx_attention_map *map = NULL;
    int n, k, failed = 0;
    for (n = 0; n < 40 && !map; n++) {
        int left = 1000;
        stx_ctx *x = limited_context(&left);
        stx_span_desc d = span_desc(0);
        stx_span *m = stx_span_create(x, &d);
        stx_begin(x, STX_EVAL);
        stx_span_forward(m, stx_tokens(x, text, 1, 64), NULL, NULL);
        left = n;
        for (k = 0; k < 40; k++) map = stx_span_attention_map(m, 0, 0);
        failed += !map;
        CHECK(!map == !stx_ok(x), "allocation %d: %s", n, stx_error(x));
        left = 1000;
        stx_destroy(x);
    }
    CHECK(map && failed > 0, "%d failures", failed);
}

static void dry_run(void) {
    int32_t text[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    const stx_attention_map *map;
    stx_span_desc d = span_desc(2);
    stx_span *m;
    stx_desc c;
    stx_ctx *x;
    size_t i;
    memset(&c, 0, sizeof c);
    c.dry = 1;
    x = stx_create(&c);
    m = stx_span_create(x, &d);
    stx_begin(x, STX_EVAL);
    stx_span_forward(m, stx_tokens(x, text, 1, 8), NULL, NULL);
    map = stx_span_attention_map(m, 0, 0);
    CHECK(map && map->keys == 8 + 5, "dry run: %s", stx_error(x));
    for (i = 0; map && i < map->heads * map->queries * map->keys; i++)
        CHECK(map->weight[i] == 0, "dry run: weight %g", map->weight[i]);
    stx_destroy(x);
}

int main(void) {
    random_forms();
    span_models();
    grouped_heads();
    other_models();
    compressed_tokens(4, 4, 6, 2, 0, 64);
    compressed_tokens(4, 8, 5, 2, 0, 64);
    compressed_tokens(6, 6, 7, 4, 0, 64);       /* the last group of a segment is shorter */
    compressed_tokens(6, 3, 4, 4, 0, 2);        /* S does not divide M: not all are known */
    compressed_tokens(5, 5, 6, 3, STX_COMP_LITERAL_PAD, 64);
    compressed_tokens(5, 7, 9, 2, 0, 3);
    tokens_after_reset();
    sru_states();
    errors();
    without_memory();
    dry_run();
    return test_end();
}
