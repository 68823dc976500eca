/* count_cuda.c - counts the operations and bytes of a training step of each configuration
   of the GPU benchmark, kernel by kernel, from formulas (cuda_model.h). Nothing is run
   and nothing is measured.

       cc -O2 bench/count_cuda.c -o build/count_cuda -lm && build/count_cuda [--kernels]
       [--tiny]
       build/count_cuda --sweeps        for tests/cuda_regs.sh --table: tiles of attention's kernels */
#define _DEFAULT_SOURCE
#include "report.h"
#include "cuda_model.h"

static void kernels_of(const work *w, const char *name, const char *what, size_t streams,
                       size_t tokens) {
    int k;
    say("Counted: %s (%s), %zu streams of %zu tokens\n\n", name, what, streams, tokens);
    header("kernel|nodes|GFLOP|executed|GB|FLOP a byte|roofline ms|planned ms");
    for (k = 0; k < w->rows; k++) {
        const work_row *r = &w->row[k];
        row_begin();
        cell(0, "%s", r->name);
        cell(1, "%.0f", r->calls);
        cell(2, "%.1f", r->flop * 1e-9);
        cell(3, "%.1f", r->run * 1e-9);
        cell(4, "%.3f", r->bytes * 1e-9);
        cell(5, "%.0f", r->flop / (r->bytes > 0 ? r->bytes : 1));
        cell(6, "%.3f", r->ms);
        cell(7, "%.3f", r->plan + 1e-3 * PLAN_NODE * r->calls);
    }
    print_table();
}

static void totals(const work *w, int at) {
    int k;
    for (k = 0; k < 2; k++) cell(at + k, "%.3f", work_sum(w, k, 0) * 1e-12);
    cell(at + 2, "%.3f", work_sum(w, ATTENTION, 3) * 1e-12);
    cell(at + 3, "%.0f %%", 100 * work_sum(w, ATTENTION, 0) / work_sum(w, ATTENTION, 3));
    cell(at + 4, "%.3f", (work_sum(w, PRODUCTS, 3) + work_sum(w, ATTENTION, 3)) * 1e-12);
    cell(at + 5, "%.3f", w->model_flop * 1e-12);
    for (k = 0; k < GROUPS; k++) cell(at + 6 + k, "%.2f", work_sum(w, k, 1) * 1e-9);
    cell(at + 10, "%.2f", work_sum(w, -1, 1) * 1e-9);
    cell(at + 11, "%.0f", work_sum(w, -1, 4));
    cell(at + 12, "%.2f", work_sum(w, -1, 2));
    cell(at + 13, "%.2f", work_sum(w, -1, 5));
}

#define TOTALS \
  "products TFLOP|attention TFLOP|executed|needed / executed|together|of the model (MFU)|products GB|attention GB|passes GB|" \
  "optimiser GB|together|nodes|roofline ms|planned ms"

/* A line for each configuration and kernel: channels that a head is filled up with,
   queries of a warp, sweep, plain tiles of a warp that are as much work as a step's */
static void sweeps(void) {
    static const char *const name[SWEEPS] = {"fwd", "queries", "keys", "table", "diagonals"};
    size_t l;
    int i, k, backward;
    for (i = 0; i < CONFIGS; i++)
        for (backward = 0; backward < 2; backward++) {
            double units[SWEEPS], all[SWEEPS] = {0}, bytes;
            tiles t = tiles_of(&configs[i], 0, 0, 0);
            for (l = 0; l < configs[i].layers; l++) {
                t = attention_sweeps(&configs[i], l, backward, units, &bytes);
                for (k = 0; k < SWEEPS; k++)
                    all[k] += units[k] * (double)configs[i].batch / sweep_unit(&t, k);
            }
            for (k = 0; k < SWEEPS; k++)
                if (all[k] > 0)
                    printf("%s %d %d %s %.0f\n", configs[i].name, t.DP, t.strip, name[k], all[k]);
        }
}

int main(int argc, char **argv) {
    int kernels = 0, small = 0, i;
    for (i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--kernels"))
            kernels = 1;
        else if (!strcmp(argv[i], "--tiny"))
            small = 1;
        else if (!strcmp(argv[i], "--sweeps")) {
            sweeps();
            return 0;
        } else if (!strcmp(argv[i], "--append") && i + 1 < argc)
            report_path = argv[++i];
        else {
            fprintf(stderr, "count_cuda [--kernels] [--tiny] [--append FILE]\n");
            return 2;
        }
    }
    say("## Counted, not measured: one training step in bf16\n\n"
        "From formulas: every operand of a kernel once, memory full. Attention "
        "TFLOP: what the mathematics needs, backward with the logits made\n"
        "once more, as they are not kept; executed: what the kernels do, "
        "of which backward has two sweeps, and a third for long heads, that make logits, "
        "probabilities and ds each\n"
        "for itself, of a tile that the window cuts in groups of 16 keys, with channels up to 32, "
        "64, 96 or "
        "128. MFU: 3 products forward and 6 backward.\n"
        "Roofline: for each kernel the longer of what it needs at %.0f TFLOP/s and its "
        "bytes at %.1f TB/s (an H200). E: mean keys of a query and head, S: mean\nrows of "
        "memory in a layer. Nodes: of the step's graph. Planned: products at %.0f %% of that rate "
        "(of gradients of weights\n"
        "by the share of 132 multiprocessors that their pieces' tiles of 128 x 128 keep busy) and "
        "passes at %.0f %%, attention at %.0f "
        "and %.0f\nexecuted TFLOP/s forward and backward, and %.1f microseconds a node; what is "
        "hoped for, not what was seen.\n\n",
        ROOF_FLOPS * 1e-12, ROOF_BYTES * 1e-12, 100 * PLAN_PRODUCTS, 100 * PLAN_BYTES,
        PLAN_FORWARD * 1e-12, PLAN_BACKWARD * 1e-12, PLAN_NODE);
    header("configuration|tokens|params M|E|S|" TOTALS);
    for (i = 0; i < CONFIGS; i++) {
        config c = small ? tiny(configs[i]) : configs[i];
        work w;
        work_count(&w, &c);
        row_begin();
        cell(0, "%s", c.name);
        cell(1, "%zu", c.batch * c.block);
        cell(2, "%.1f", parameters(&c) * 1e-6);
        cell(3, "%.0f", mean_keys(&c));
        cell(4, "%.0f", mean_window(&c));
        totals(&w, 5);
    }
    print_table();
    header("other families|tokens|params M|" TOTALS);
    for (i = 0; i < FAMILIES; i++) {
        const family *f = &families[i];
        work w;
        family_count(&w, f);
        row_begin();
        cell(0, "%s", f->name);
        cell(1, "%zu", f->batch * f->block);
        cell(2, "%.1f", family_parameters(f) * 1e-6);
        totals(&w, 3);
    }
    print_table();
    for (i = 0; kernels && i < CONFIGS; i++) {
        config c = small ? tiny(configs[i]) : configs[i];
        work w;
        work_count(&w, &c);
        kernels_of(&w, c.name, c.what, c.batch, c.block);
    }
    for (i = 0; kernels && i < FAMILIES; i++) {
        work w;
        family_count(&w, &families[i]);
        kernels_of(&w, families[i].name, families[i].what, families[i].batch, families[i].block);
    }
    return 0;
}
