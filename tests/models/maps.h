/* maps.h - checks attention maps against the outputs of the fused kernel. Include after
   a header of the library. */
#ifndef STX_TEST_MAPS_H
#define STX_TEST_MAPS_H
#include "../values.h"

/* Returns the value of key n of a map for one head, as the kernel reads it, or NULL if it
   is zero or not stored. a: arguments of stx_attention_host. *factor receives the factor
   of the value. */
static inline const stx_real *map_value(const stx_attention_args *a, const stx_attention_map *map,
                                        size_t h, size_t n, double *factor) {
    const size_t zero = map->count[STX_KEY_ZERO], g = a->groups > 1 ? a->head_group[h] : 0;
    const size_t head = a->groups > 1 ? a->head_index[h] : h;
    const stx_attention_kv *c = &a->cached[g];
    size_t j = n - zero;
    *factor = 1;
    if (n < zero) return NULL;
    if (j >= a->S) {
        *factor = sqrt((double)a->N);
        return a->persistent_v + (h * a->N + j - a->S) * a->D;
    }
    if (j >= a->cached_rows)
        return a->v + (j - a->cached_rows) * a->kv_row_stride + h * a->D;
    j += c->rows;
    return j < a->cached_rows ? NULL : c->v + (j - a->cached_rows) * c->row_stride + head * a->D;
}

/* Checks the map of stream b of an attention: the sums of the weights, and weights times
   values against the output of the kernel. `record` is what the forward pass stored. */
static inline void check_map(stx_ctx *x, const char *what, size_t l, size_t b,
                             const stx_attention_record *record, const stx_attention_map *map) {
    const double tol = sizeof(stx_real) == 8 ? 1e-12 : 2e-5;
    const stx_attention_args *a = map ? stx_attention_host(x, record->args, b) : NULL;
    double worst = 0, most = 1, sums = 0;
    size_t h, i, n, c, count = 0;
    CHECK(map && a, "%s: map of layer %zu: %s", what, l, stx_error(x));
    if (!map || !a) return;
    for (n = 0; n < STX_KEY_KINDS; n++) count += map->count[n];
    CHECK(map->heads == a->H && map->queries == a->T && map->keys == count
              && count - map->count[STX_KEY_ZERO] == a->S + a->N
              && map->count[STX_KEY_SEGMENT] == a->T,
          "%s: map of layer %zu is (%zu,%zu,%zu)", what, l, map->heads, map->queries, map->keys);
    for (h = 0; h < a->H; h++)
        for (i = 0; i < a->T; i++) {
            const double *w = map->weight + (h * a->T + i) * map->keys;
            const stx_real *y = a->y + (i * a->H + h) * a->D;
            double sum = 0, factor, out;
            for (n = 0; n < map->keys; n++) {
                const int later = !a->not_causal && map->key[n].tokens
                                  && map->key[n].first > (ptrdiff_t)i - a->delta_min;
                sum += w[n];
                if (w[n] < 0 || ((later || map->key[n].missing) && w[n] > 0)) worst = HUGE_VAL;
            }
            for (c = 0; c < a->D; c++) {
                for (out = 0, n = 0; n < map->keys; n++) {
                    const stx_real *v = w[n] > 0 ? map_value(a, map, h, n, &factor) : NULL;
                    if (v) out += w[n] * factor * (double)v[c];
                }
                raise_worst(&worst, fabs(out - (double)y[c]));
                raise_worst(&most, fabs(out));
            }
            if (a->drop > 0) continue;
            if (a->no_renorm || a->eps > 0)
                CHECK(sum >= 0 && sum < 1 + 1e-12, "%s: the weights sum to %g", what, sum);
            else if (sum > 0)
                raise_worst(&sums, fabs(sum - 1));
        }
    CHECK(worst <= tol * most, "%s: layer %zu, stream %zu: weights times values differ from the "
          "attention by %g", what, l, b, worst);
    CHECK(sums <= 1e-12, "%s: layer %zu: the sums of the weights differ from 1 by %g", what, l,
          sums);
}
#endif
