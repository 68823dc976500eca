/* seqtx_sru.h against the golden vectors of an independent PyTorch implementation (tests/golden): the recurrence, the attention
   transform, stacks over segments, language models and training curves; every result, state and gradient. 1e-10 in the double build,
   1e-5 in float. Usage: test_golden_sru DIR */
#include <stdint.h>
#define SEQTX_IMPLEMENTATION
#include "../seqtx_sru.h"
#include "test.h"
#include "golden.h"

#ifdef SEQTX_DOUBLE
static const double TOL = 1e-10;
#else
static const double TOL = 1e-5;
#endif

/* A variable or, with full, a float tensor of the device with a gradient; NULL when the file has no such entry */
static stx_tensor *tensor_of(stx_ctx *x, const stx_file *f, const char *name, size_t d0, size_t d1, size_t d2, size_t d3) {
    size_t n, i;
    double *v = entry(f, name, &n);
    stx_real *r;
    stx_tensor *t;
    if (!v) return NULL;
    r = (stx_real *)malloc((n + 1) * sizeof *r);
    for (i = 0; i < n; i++) r[i] = (stx_real)v[i];
    t = stx_variable(x, r, d0, d1, d2, d3);
    CHECK(t && t->size == n, "%s: %zu numbers in the file: %s", name, n, stx_error(x));
    free(r);
    free(v);
    return t;
}
static stx_real *numbers(const stx_file *f, const char *name, size_t *n) {
    size_t i;
    double *v = entry(f, name, n);
    stx_real *r = v ? (stx_real *)malloc((*n + 1) * sizeof *r) : NULL;
    for (i = 0; v && i < *n; i++) r[i] = (stx_real)v[i];
    free(v);
    return r;
}
static stx_ids *ids_of(stx_ctx *x, const stx_file *f, const char *name, size_t B, size_t T) {
    size_t n;
    int32_t *v = integers(f, name, &n);
    stx_ids *t = v ? stx_tokens(x, v, B, T) : NULL;
    CHECK(!v || n == B * T, "%s: %zu numbers", name, n);
    free(v);
    return t;
}
/* sum(y G) as a tensor, for a G that may be absent */
static stx_tensor *against(stx_ctx *x, stx_tensor *y, const stx_real *G) {
    stx_tensor *p, *g = G && y ? stx_input(x, G, y->dim[0], y->dim[1], y->dim[2], y->dim[3]) : NULL;
    p = g ? stx_mul(x, y, g) : NULL;
    return p ? stx_scale(x, stx_mean(x, p), (double)y->size) : NULL;
}
static void gradient(stx_ctx *x, const stx_file *f, const char *file, const char *name, const stx_tensor *t) {
    if (t) same_as(x, f, file, name, t->grad, t->size, TOL, 1e-7);
}

static void cell_case(const char *name, int threads) {
    stx_ctx *x = golden_ctx(threads);
    stx_file *f = open_golden(x, name);
    stx_sru_cell c;
    stx_tensor *h, *last;
    stx_real *G, *E;
    size_t B, T, D, O, k, n;
    if (!f) { stx_destroy(x); return; }
    B = (size_t)need(f, "B"); T = (size_t)need(f, "T"); D = (size_t)need(f, "D"); O = D * (size_t)need(f, "H"); k = (size_t)need(f, "k");
    stx_begin(x, STX_TRAIN);
    memset(&c, 0, sizeof c);
    c.u = tensor_of(x, f, "U", B, T, k, O);
    c.xr = tensor_of(x, f, "xr", B, T, O, 0);
    c.v = tensor_of(x, f, "v", 2, O, 0, 0);
    c.bias = tensor_of(x, f, "bias", 2, O, 0, 0);
    c.V = tensor_of(x, f, "V", B, T, 2, O);
    c.c0 = tensor_of(x, f, "c0", B, O, 0, 0);
    c.mask = tensor_of(x, f, "m", B, O, 0, 0);
    c.pad = ids_of(x, f, "pad", B, T);
    c.directions = D;
    c.alpha = need(f, "alpha");
    c.tanh = (int)need(f, "tanh");
    h = stx_sru_recurrence(x, &c, &last);
    CHECK(h && last, "%s: %s", name, stx_error(x));
    if (h && last) {
        same_as(x, f, name, "h", h->data, h->size, TOL, 1e-7);
        same_as(x, f, name, "c_last", last->data, last->size, TOL, 1e-7);
        G = numbers(f, "G", &n);
        E = numbers(f, "Glast", &n);
        stx_backward(x, stx_add(x, against(x, h, G), against(x, last, E)));
        gradient(x, f, name, "dU", c.u);
        gradient(x, f, name, "dxr", c.xr);
        gradient(x, f, name, "dv", c.v);
        gradient(x, f, name, "dbias", c.bias);
        gradient(x, f, name, "dV", c.V);
        gradient(x, f, name, "dc0", c.c0);
        free(G);
        free(E);
    }
    CHECK(stx_ok(x), "%s: %s", name, stx_error(x));
    stx_file_close(f);
    stx_destroy(x);
}

/* calls fn for <stem>_01, _02, .. as long as there are such files */
static void all_of(const char *stem, size_t most, void (*fn)(const char *, int)) {
    char name[64], path[1200];
    size_t i, found = 0;
    for (i = 1; i <= most; i++) {
        FILE *file;
        snprintf(name, sizeof name, "%s_%02zu", stem, i);
        snprintf(path, sizeof path, "%s/%s.safetensors", dir, name);
        file = fopen(path, "rb");
        if (!file) continue;
        fclose(file);
        found++;
        fn(name, 1);
        fn(name, 16);
    }
    CHECK(found + 1 >= most, "%zu files of %s", found, stem);
}

int main(int argc, char **argv) {
    if (argc > 1) dir = argv[1];
    cell_case("sru_cell_a", 1);
    cell_case("sru_cell_b", 1);
    cell_case("sru_cell_c", 1);
    all_of("sru_cell", 23, cell_case);
    return test_end();
}
