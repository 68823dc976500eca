/* count_cuda.c - counts the operations and bytes of one training step, kernel by
   kernel, for each configuration of the GPU benchmark. The counts come from formulas
   (cuda_model.h); nothing is run or measured.

       cc -O2 bench/cuda/count_cuda.c -o build/count_cuda -lm
       build/count_cuda [--kernels] [--tiny] [--append FILE]
       build/count_cuda --sweeps        tiles of the attention kernels, for
                                        tests/cuda/cuda_regs.sh --table */
#define _DEFAULT_SOURCE
#include "../report.h"
#include "cuda_model.h"

static void kernels_of(const work *w, const char *name, const char *what, size_t streams,
                       size_t tokens) {
    int k;
    say("Counted: %s (%s), %zu streams of %zu tokens\n\n", name, what, streams, tokens);
    header("kernel|nodes|GFLOP|executed|GB|FLOP per byte|roofline ms|planned ms");
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
    double attention = work_sum(w, ATTENTION, WORK_RUN);
    int k;
    for (k = 0; k < 2; k++) cell(at + k, "%.3f", work_sum(w, k, WORK_FLOP) * 1e-12);
    cell(at + 2, "%.3f", attention * 1e-12);
    cell(at + 3, "%.0f %%", 100 * work_sum(w, ATTENTION, WORK_FLOP) / attention);
    cell(at + 4, "%.3f", (work_sum(w, MATMULS, WORK_RUN) + attention) * 1e-12);
    cell(at + 5, "%.3f", w->model_flop * 1e-12);
    for (k = 0; k < GROUPS; k++) cell(at + 6 + k, "%.2f", work_sum(w, k, WORK_BYTES) * 1e-9);
    cell(at + 10, "%.2f", work_sum(w, -1, WORK_BYTES) * 1e-9);
    cell(at + 11, "%.0f", work_sum(w, -1, WORK_NODES));
    cell(at + 12, "%.2f", work_sum(w, -1, WORK_MS));
    cell(at + 13, "%.2f", work_sum(w, -1, WORK_PLAN));
}

#define TOTALS \
  "matmuls TFLOP|attention TFLOP|executed|needed / executed|together|of the model (MFU)|" \
  "matmuls GB|attention GB|passes GB|optimiser GB|together|nodes|roofline ms|planned ms"

/* Prints one line per configuration and kernel: the padded channels per head, the queries
   per warp, the name of the sweep, and the work of a step in units of full warp tiles. */
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

static void say_meaning(void) {
    say("## Counted, not measured: one training step in bf16\n\n"
        "By formulas: every operand of a kernel once, memory full. Attention TFLOP: the required "
        "operations, backward with\nrecomputed logits, which are not kept. Executed: by the "
        "kernels. Backward has two sweeps, and a third for long\nheads, each of which recomputes "
        "logits, probabilities and ds; a tile that the window cuts is computed in groups\nof 16 "
        "keys, with 32, 64, 96 or 128 channels. MFU: 3 matmuls forward and 6 backward.\n"
        "Roofline: for each kernel the longer of the times of its operations at %.0f TFLOP/s and "
        "of its bytes at %.1f TB/s\n(an H200). E: mean keys per query and head, S: mean rows of "
        "memory per layer. Nodes: of the step's graph. Planned:\nmatmuls at %.0f %% of that rate "
        "(gradients of weights: times the share of 132 multiprocessors that the tiles of\n128 x "
        "128 of their pieces keep busy), passes at %.0f %%, attention at %.0f and %.0f executed "
        "TFLOP/s forward and\nbackward, and %.1f microseconds per node. These rates are expected, "
        "not measured.\n\n",
        ROOF_FLOPS * 1e-12, ROOF_BYTES * 1e-12, 100 * PLAN_MATMULS, 100 * PLAN_BYTES,
        PLAN_FORWARD * 1e-12, PLAN_BACKWARD * 1e-12, PLAN_NODE);
}

static void table_configurations(int small) {
    int i;
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
}

static void table_families(void) {
    int i;
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
}

static void tables_kernels(int small) {
    work w;
    int i;
    for (i = 0; i < CONFIGS; i++) {
        config c = small ? tiny(configs[i]) : configs[i];
        work_count(&w, &c);
        kernels_of(&w, c.name, c.what, c.batch, c.block);
    }
    for (i = 0; i < FAMILIES; i++) {
        const family *f = &families[i];
        family_count(&w, f);
        kernels_of(&w, f->name, f->what, f->batch, f->block);
    }
}

int main(int argc, char **argv) {
    int kernels = 0, small = 0, only_sweeps = 0, i, taken;
    const option options[] = {OPTION_FLAG("--kernels", &kernels), OPTION_FLAG("--tiny", &small),
                              OPTION_FLAG("--sweeps", &only_sweeps),
                              OPTION_TEXT("--append", &report_path), OPTION_END};
    program = "count_cuda";
    for (i = 1; i < argc; i += taken) {
        taken = option_take(options, argc, argv, i);
        if (!taken)
            return option_unknown(argv[i], "count_cuda [--kernels] [--tiny] [--append FILE]\n");
    }
    if (only_sweeps) {
        sweeps();
        return 0;
    }
    say_meaning();
    table_configurations(small);
    table_families();
    if (kernels) tables_kernels(small);
    return 0;
}
