/* count_kernels.c - prints what the interpreter of PTX (tests/ptx_host) counted for the
   kernels of a program, and which resource of a GPU bounds each of them.

       PTX_FILE=build/seqtx_cuda_sm_90.ptx PTX_LAUNCHES=build/sru.launches \
           build/test_cuda_sru_ptx short
       cc -O2 bench/cuda/count_kernels.c -o build/count_kernels -lm
       build/count_kernels [--kernel TEXT] [--shapes] [--regs FILE] [--append FILE] \
           build/sru.launches ..

   Each kernel is shown with the launch shape that took most of its instructions; with
   --shapes, with all of them. --kernel selects kernels whose names contain TEXT. */
#define _DEFAULT_SOURCE
#include "../report.h"
#include "machines.h"

static const char *registers_path = "tests/cuda/cuda_regs.txt", *only;
static int all_shapes;


// >>launches

/* The counters in the order of the names below. */
enum {
    C_INSTRUCTIONS, C_THREADS, C_ARITHMETIC, C_SPECIAL, C_CONVERSION, C_CONTROL, C_COLLECTIVE,
    C_BARRIER, C_DOUBLES, C_SHUFFLES, C_MMA, C_LOADS, C_STORES, C_ATOMICS, C_SHARED_LOADS,
    C_SHARED_STORES, C_LOCAL, C_READ, C_WRITTEN, C_IDEAL_READ, C_IDEAL_WRITTEN, C_UNIQUE_READ,
    C_UNIQUE_WRITTEN, C_WAVEFRONTS, C_IDEAL_WAVEFRONTS, C_DIVERGENT, C_WARPS, COUNTERS
};

static const char *const counter_name[COUNTERS] = {
    "instructions", "threads", "arithmetic", "special", "conversion", "control", "collective",
    "barrier", "doubles", "shuffles", "mma", "global_loads", "global_stores", "atomics",
    "shared_loads", "shared_stores", "local", "sectors_read", "sectors_written", "ideal_read",
    "ideal_written", "unique_read", "unique_written", "wavefronts", "ideal_wavefronts",
    "divergent", "warps"};

/* The launches of a kernel with one shape. */
typedef struct shape {
    char name[160], grid[40];
    int threads, registers[MACHINES], listed;
    size_t stat, dynamic; /* bytes of shared memory */
    double launches, blocks, of[COUNTERS];
} shape;

enum { MAX_SHAPES = 4096 };

static shape shapes[MAX_SHAPES];
static int shape_count;

/* Returns the value after a name in a line of words, or 0. */
static double value_of(const char *line, const char *name) {
    char quoted[40];
    const char *p;
    snprintf(quoted, sizeof quoted, " %s ", name);
    p = strstr(line, quoted);
    return p ? strtod(p + strlen(quoted), NULL) : 0;
}

static shape *shape_of(const shape *like) {
    int i;
    for (i = 0; i < shape_count; i++)
        if (!strcmp(shapes[i].name, like->name) && !strcmp(shapes[i].grid, like->grid)
            && shapes[i].threads == like->threads && shapes[i].dynamic == like->dynamic)
            return &shapes[i];
    if (shape_count == MAX_SHAPES) die("too many launch shapes");
    shapes[shape_count] = *like;
    return &shapes[shape_count++];
}

static void read_launches(const char *path) {
    static char line[4096];
    FILE *f = fopen(path, "r");
    int i;
    if (!f) die("cannot read a file of launches");
    shape_count = 0;
    while (fgets(line, sizeof line, f)) {
        shape s, *to;
        memset(&s, 0, sizeof s);
        if (sscanf(line, "%159s grid %39s", s.name, s.grid) != 2) continue;
        if (only && !strstr(s.name, only)) continue;
        s.threads = (int)value_of(line, "block");
        s.stat = (size_t)value_of(line, "static");
        s.dynamic = (size_t)value_of(line, "dynamic");
        to = shape_of(&s);
        to->launches++;
        to->blocks += value_of(line, "blocks");
        for (i = 0; i < COUNTERS; i++) to->of[i] += value_of(line, counter_name[i]);
    }
    fclose(f);
}

/* Adds the registers of the kernels on each machine. */
static void read_registers(void) {
    char line[512], arch[16], name[200];
    FILE *f = fopen(registers_path, "r");
    int n, i, m;
    if (!f) die("cannot read the file of registers");
    while (fgets(line, sizeof line, f)) {
        if (sscanf(line, "%15s %199s %d", arch, name, &n) != 3) continue;
        for (i = 0; i < shape_count; i++)
            for (m = 0; m < MACHINES; m++)
                if (!strcmp(machines[m].arch, arch) && !strcmp(shapes[i].name, name))
                    shapes[i].registers[m] = n;
    }
    fclose(f);
}


// >>what bounds a kernel

enum { R_MEMORY, R_ISSUE, R_SHARED, R_SHUFFLE, R_DOUBLE, R_SPECIAL, R_MMA, RESOURCES };

static const char *const resource_name[RESOURCES] = {"memory", "issue", "shared", "shuffle",
                                                     "f64", "special", "mma"};

/* The clocks of a multiprocessor that each resource needs for a block. Returns the one
   that needs most. */
static int resources(const machine *m, const shape *s, double clocks[RESOURCES]) {
    int i, most = 0;
    clocks[R_MEMORY] = 32 * (s->of[C_UNIQUE_READ] + s->of[C_UNIQUE_WRITTEN]) / machine_bytes(m);
    clocks[R_ISSUE] = s->of[C_INSTRUCTIONS] / m->issue;
    clocks[R_SHARED] = s->of[C_WAVEFRONTS] / m->shared;
    clocks[R_SHUFFLE] = s->of[C_SHUFFLES] / m->shuffle;
    clocks[R_DOUBLE] = s->of[C_DOUBLES] / m->doubles;
    clocks[R_SPECIAL] = s->of[C_SPECIAL] / m->special;
    clocks[R_MMA] = s->of[C_MMA] / m->mma;
    for (i = 0; i < RESOURCES; i++) {
        clocks[i] /= s->blocks > 0 ? s->blocks : 1;
        if (clocks[i] > clocks[most]) most = i;
    }
    return most;
}

/* The clocks of all launches of a shape, by the resource that needs most. */
static double bound(const machine *m, const shape *s) {
    double clocks[RESOURCES];
    int most = resources(m, s, clocks);
    return clocks[most] * s->blocks;
}

/* Lists one shape of each kernel, or all shapes, those that take most clocks first. */
static int by_bound(const void *a, const void *b) {
    double x = bound(&machines[1], (const shape *)a), y = bound(&machines[1], (const shape *)b);
    return x > y ? -1 : x < y;
}

static void choose_shapes(void) {
    int i, k;
    qsort(shapes, (size_t)shape_count, sizeof *shapes, by_bound);
    for (i = 0; i < shape_count; i++) {
        shapes[i].listed = 1;
        for (k = 0; k < i && !all_shapes; k++)
            if (!strcmp(shapes[k].name, shapes[i].name)) shapes[i].listed = 0;
    }
}


// >>tables

/* Shortens a name: without stx__, _kernel and the names of templates of types. */
static const char *short_name(const shape *s) {
    static const char *const drop[] = {"stx__", "_kernel", "attn_bwd_shape", "attn_bwd_variants",
                                       "__nv_", "attn_bf16", "attn_f32", "attn_tf32", "loat16"};
    static const char *const by[] = {"", "", "", "", "", "bf16", "f32", "tf32", "16"};
    static char name[160];
    size_t n = 0;
    const char *p = s->name;
    while (*p) {
        size_t i;
        for (i = 0; i < sizeof drop / sizeof *drop; i++)
            if (!strncmp(p, drop[i], strlen(drop[i]))) break;
        if (i < sizeof drop / sizeof *drop) {
            n += (size_t)snprintf(name + n, sizeof name - n, "%s", by[i]);
            p += strlen(drop[i]);
        } else
            name[n++] = *p++;
    }
    name[n] = 0;
    return name;
}

static void percent(int column, double part, double all) {
    if (all > 0 && part > 0) cell(column, "%.0f", 100 * part / all);
    else cell(column, "-");
}

static void ratio(int column, double a, double b) {
    if (b > 0) cell(column, "%.2f", a / b);
    else cell(column, "-");
}

static void table_launches(void) {
    double all = 0;
    int i, m;
    for (i = 0; i < shape_count; i++) all += bound(&machines[1], &shapes[i]);
    header("kernel|% of clocks|launches|blocks|threads|shared|A100: regs|blocks|warps|limit|"
           "H100: regs|blocks|warps|limit");
    for (i = 0; i < shape_count; i++) {
        const shape *s = &shapes[i];
        if (!s->listed) continue;
        row_begin();
        cell(0, "%s", short_name(s));
        cell(1, "%.1f", 100 * bound(&machines[1], s) / all);
        cell(2, "%.0f", s->launches);
        cell(3, "%.0f", s->blocks / s->launches);
        cell(4, "%d", s->threads);
        cell(5, "%zu", s->stat + s->dynamic);
        for (m = 0; m < 2; m++) {
            occupancy o =
                occupancy_of(&machines[m], s->threads, s->registers[m], s->stat + s->dynamic);
            if (!s->registers[m]) continue;
            cell(6 + 4 * m, "%d", s->registers[m]);
            cell(7 + 4 * m, "%d", o.blocks);
            cell(8 + 4 * m, "%d", o.warps);
            cell(9 + 4 * m, "%s", o.limit);
        }
    }
    print_table();
}

static void table_instructions(void) {
    int i;
    header("kernel|per warp|alu|f64|sfu|cvt|bra|shfl|sync|mem|mma|lanes");
    for (i = 0; i < shape_count; i++) {
        const shape *s = &shapes[i];
        const double *c = s->of, n = c[C_INSTRUCTIONS];
        double sync = c[C_COLLECTIVE] + c[C_BARRIER];
        double others = c[C_ARITHMETIC] + c[C_DOUBLES] + c[C_SPECIAL] + c[C_CONVERSION]
                        + c[C_CONTROL] + c[C_SHUFFLES] + sync + c[C_MMA];
        if (!s->listed) continue;
        row_begin();
        cell(0, "%s", short_name(s));
        cell(1, "%.0f", n / c[C_WARPS]);
        percent(2, c[C_ARITHMETIC], n);
        percent(3, c[C_DOUBLES], n);
        percent(4, c[C_SPECIAL], n);
        percent(5, c[C_CONVERSION], n);
        percent(6, c[C_CONTROL], n);
        percent(7, c[C_SHUFFLES], n);
        percent(8, sync, n);
        percent(9, n - others, n);
        percent(10, c[C_MMA], n);
        cell(11, "%.1f", c[C_THREADS] / n);
    }
    print_table();
}

static void table_memory(void) {
    int i;
    header("kernel|loads: sectors|/ ideal|stores: sectors|/ ideal|KB asked|unique|banks|divergent");
    for (i = 0; i < shape_count; i++) {
        const shape *s = &shapes[i];
        const double *c = s->of;
        if (!s->listed) continue;
        row_begin();
        cell(0, "%s", short_name(s));
        ratio(1, c[C_READ], c[C_LOADS]);
        ratio(2, c[C_READ], c[C_IDEAL_READ]);
        ratio(3, c[C_WRITTEN], c[C_STORES]);
        ratio(4, c[C_WRITTEN], c[C_IDEAL_WRITTEN]);
        cell(5, "%.1f", 0.032 * (c[C_READ] + c[C_WRITTEN]) / s->launches);
        cell(6, "%.1f", 0.032 * (c[C_UNIQUE_READ] + c[C_UNIQUE_WRITTEN]) / s->launches);
        ratio(7, c[C_WAVEFRONTS], c[C_IDEAL_WAVEFRONTS]);
        cell(8, "%.1f", c[C_DIVERGENT] / c[C_WARPS]);
    }
    print_table();
}

static void table_bounds(void) {
    int i, k, m;
    header("kernel|clocks|memory|issue|shared|shfl|f64|sfu|mma|A100|H100|H200");
    for (i = 0; i < shape_count; i++) {
        const shape *s = &shapes[i];
        double clocks[RESOURCES];
        int most = resources(&machines[1], s, clocks);
        if (!s->listed) continue;
        row_begin();
        cell(0, "%s", short_name(s));
        cell(1, "%.0f", clocks[most]);
        for (k = 0; k < RESOURCES; k++) percent(2 + k, clocks[k], clocks[most]);
        for (m = 0; m < MACHINES; m++)
            cell(2 + RESOURCES + m, "%s", resource_name[resources(&machines[m], s, clocks)]);
    }
    print_table();
}

int main(int argc, char **argv) {
    int i, taken;
    const option options[] = {OPTION_TEXT("--kernel", &only), OPTION_FLAG("--shapes", &all_shapes),
                              OPTION_TEXT("--regs", &registers_path),
                              OPTION_TEXT("--append", &report_path), OPTION_END};
    program = "count_kernels";
    for (i = 1; i < argc; i += taken) {
        taken = option_take(options, argc, argv, i);
        if (taken) continue;
        if (argv[i][0] == '-')
            return option_unknown(argv[i], "count_kernels [--kernel TEXT] [--shapes] [--regs FILE] "
                                           "[--append FILE] FILE ..\n");
        taken = 1;
        read_launches(argv[i]);
        read_registers();
        choose_shapes();
        table_launches();
        table_instructions();
        table_memory();
        table_bounds();
    }
    return 0;
}
