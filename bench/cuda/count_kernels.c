/* count_kernels.c - prints what the interpreter of PTX (tests/ptx_host) counted for the
   kernels of a program, and which resource of a GPU bounds each of them.

       PTX_FILE=build/seqtx_cuda_sm_90.ptx PTX_LAUNCHES=build/sru.launches \
           build/test_cuda_sru_ptx short
       cc -O2 bench/cuda/count_kernels.c -o build/count_kernels -lm
       build/count_kernels --kernel sru build/sru.launches

   sh bench/run_cuda.sh --count does this for the kernels of training steps. */
#define _DEFAULT_SOURCE
#include "../report.h"
#include "machines.h"

static const char *registers_path = "tests/cuda/cuda_regs.txt", *only;
static int all_shapes;


// >>launches

/* The counters in the order of the names below. */
enum {
    C_INSTRUCTIONS, C_THREADS, C_WARPS, C_ARITHMETIC, C_DOUBLES, C_MOVES, C_SPECIAL,
    C_CONVERSION, C_CONTROL, C_COLLECTIVE, C_SHUFFLES, C_BARRIER, C_MMA, C_LOADS, C_STORES,
    C_READ, C_WRITTEN, C_IDEAL_READ, C_IDEAL_WRITTEN, C_UNIQUE_READ, C_UNIQUE_WRITTEN,
    C_WAVEFRONTS, C_IDEAL_WAVEFRONTS, C_DIVERGENT, COUNTERS
};

static const char *const counter_name[COUNTERS] = {
    "instructions", "threads", "warps", "arithmetic", "doubles", "moves", "special",
    "conversion", "control", "collective", "shuffles", "barrier", "mma", "global_loads",
    "global_stores", "sectors_read", "sectors_written", "ideal_read", "ideal_written",
    "unique_read", "unique_written", "wavefronts", "ideal_wavefronts", "divergent"};

/* The launches of a kernel with one shape. */
typedef struct shape {
    char name[160], grid[40];
    int threads, registers[MACHINES];
    int listed; /* NOT_LISTED .. IN_ALL_TABLES */
    size_t fixed, dynamic; /* bytes of shared memory */
    double launches, blocks, of[COUNTERS];
} shape;

enum { NOT_LISTED, IN_FIRST_TABLE, IN_ALL_TABLES };

enum { MAX_SHAPES = 4096, MAX_KERNELS = 1024 };

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

/* The accesses of a kernel to memory by the instructions of one kind in one line of the
   source. */
typedef struct place {
    char name[160], instruction[64], at[128];
    double requests, units, ideal; /* units: sectors, or passes over shared memory */
} place;

enum { MAX_PLACES = 8192 };

static place places[MAX_PLACES];
static int place_count;

static void read_access(const char *line) {
    place p, *to;
    int i;
    memset(&p, 0, sizeof p);
    if (sscanf(line, "access %159s %lf %lf %lf %63s %127[^\n]", p.name, &p.requests, &p.units,
               &p.ideal, p.instruction, p.at) != 6)
        return;
    if (only && !strstr(p.name, only)) return;
    for (i = 0; i < place_count; i++)
        if (!strcmp(places[i].name, p.name) && !strcmp(places[i].at, p.at)
            && !strcmp(places[i].instruction, p.instruction))
            break;
    if (i == MAX_PLACES) die("too many accesses");
    if (i == place_count) {
        places[place_count++] = p;
        return;
    }
    to = &places[i];
    to->requests += p.requests;
    to->units += p.units;
    to->ideal += p.ideal;
}

static void read_launches(const char *path) {
    static char line[4096];
    FILE *f = fopen(path, "r");
    int i;
    if (!f) die("cannot read a file of launches");
    shape_count = place_count = 0;
    while (fgets(line, sizeof line, f)) {
        shape s, *to;
        read_access(line);
        memset(&s, 0, sizeof s);
        if (sscanf(line, "%159s grid %39s", s.name, s.grid) != 2) continue;
        if (only && !strstr(s.name, only)) continue;
        s.threads = (int)value_of(line, "block");
        s.fixed = (size_t)value_of(line, "static");
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

/* The clocks of a multiprocessor that each resource needs for a block. Returns the one
   that needs most. */
static int resources(const machine *m, const shape *s, double clocks[RESOURCES]) {
    static const int counter[RESOURCES] = {0,         C_INSTRUCTIONS, C_WAVEFRONTS, C_SHUFFLES,
                                           C_DOUBLES, C_SPECIAL,      C_MMA};
    double amount[RESOURCES];
    int i;
    for (i = 0; i < RESOURCES; i++) amount[i] = s->of[counter[i]] / s->blocks;
    amount[R_ISSUE] -= s->of[C_MOVES] / s->blocks;
    amount[R_MEMORY] = 32 * (s->of[C_UNIQUE_READ] + s->of[C_UNIQUE_WRITTEN]) / s->blocks;
    return machine_clocks(m, amount, clocks);
}

/* The clocks of all launches of a shape, by the resource that needs most. */
static double bound(const machine *m, const shape *s) {
    double clocks[RESOURCES];
    int most = resources(m, s, clocks);
    return clocks[most] * s->blocks;
}

static int by_bound(const void *a, const void *b) {
    double x = bound(&machines[H100], (const shape *)a);
    double y = bound(&machines[H100], (const shape *)b);
    return x > y ? -1 : x < y;
}

/* The kernels of the tables so far. */
static char seen[MAX_KERNELS][160];
static int seen_count;

/* Returns 1 if the tables have not shown a kernel yet. */
static int is_new(const char *name) {
    int i;
    for (i = 0; i < seen_count; i++)
        if (!strcmp(seen[i], name)) return 0;
    if (seen_count == MAX_KERNELS) die("too many kernels");
    memcpy(seen[seen_count++], name, sizeof seen[0]);
    return 1;
}

/* Sorts the shapes and lists the first of each kernel, or all. Kernels that take less
   than 1 % and are in an earlier table are only in the first table. */
static void choose_shapes(void) {
    int i, k;
    double all = 0;
    qsort(shapes, (size_t)shape_count, sizeof *shapes, by_bound);
    for (i = 0; i < shape_count; i++) all += bound(&machines[H100], &shapes[i]);
    for (i = 0; i < shape_count; i++) {
        int again = 0, large = bound(&machines[H100], &shapes[i]) >= 0.01 * all;
        for (k = 0; k < i; k++) again |= !strcmp(shapes[k].name, shapes[i].name);
        if (again && !all_shapes) continue;
        shapes[i].listed = is_new(shapes[i].name) || large ? IN_ALL_TABLES : IN_FIRST_TABLE;
    }
}


// >>tables

/* Shortens a name: stx__, _kernel, the templates of types and the usual type, bf16, are
   left out. */
static const char *short_name(const char *full) {
    static const struct {
        const char *from, *to;
    } words[] = {{"stx__attn_bf16,", ""}, {"stx__attn_tf32", "tf32"}, {"stx__attn_f32", "f32"},
                 {"stx__attn_bwd_shape<", ""}, {"stx__attn_bwd_variants<", ""},
                 {"__nv_bfloat16,", ""}, {"stx__", ""}, {"_kernel", ""}, {">>", ">"}};
    static char name[160];
    size_t n = 0, i, w;
    const char *p = full;
    while (*p && n + 8 < sizeof name) {
        for (i = 0; i < sizeof words / sizeof *words; i++) {
            w = strlen(words[i].from);
            if (!strncmp(p, words[i].from, w)) break;
        }
        if (i < sizeof words / sizeof *words) {
            n += (size_t)snprintf(name + n, sizeof name - n, "%s", words[i].to);
            p += w;
        } else
            name[n++] = *p++;
    }
    name[n] = 0;
    return name;
}

static void percent(int column, double part, double all) {
    if (all > 0 && part > 0)
        cell(column, "%.0f", 100 * part / all);
    else
        cell(column, "-");
}

static void ratio(int column, int digits, double a, double b) {
    if (b > 0)
        cell(column, "%.*f", digits, a / b);
    else
        cell(column, "-");
}

/* Calls row(s) for each shape that is listed to this degree, in a new row of a table. */
static void table_of(const char *columns, int degree, void (*row)(const shape *s)) {
    int i;
    header(columns);
    for (i = 0; i < shape_count; i++) {
        if (shapes[i].listed < degree) continue;
        row_begin();
        cell(0, "%s", short_name(shapes[i].name));
        row(&shapes[i]);
    }
    print_table();
}

static void row_bounds(const shape *s) {
    double clocks[RESOURCES], all = 0;
    int i, m, most = resources(&machines[H100], s, clocks);
    for (i = 0; i < shape_count; i++) all += bound(&machines[H100], &shapes[i]);
    cell(1, "%.1f", 100 * bound(&machines[H100], s) / all);
    cell(2, "%.0f", s->launches);
    cell(3, "%.0f", s->blocks / s->launches);
    cell(4, "%.0f", clocks[most]);
    for (m = 0; m < MACHINES; m++)
        cell(5 + m, "%s", resource_name[resources(&machines[m], s, clocks)]);
}

static void row_resources(const shape *s) {
    double clocks[RESOURCES];
    int k, most = resources(&machines[H100], s, clocks);
    for (k = 0; k < RESOURCES; k++) percent(1 + k, clocks[k], clocks[most]);
    ratio(1 + RESOURCES, 1, s->of[C_THREADS], s->of[C_INSTRUCTIONS]);
    ratio(2 + RESOURCES, 1, s->of[C_DIVERGENT], s->of[C_WARPS]);
}

static void row_occupancy(const shape *s) {
    const size_t shared = s->fixed + s->dynamic;
    int m;
    cell(1, "%d", s->threads);
    cell(2, "%zu", shared);
    for (m = 0; m < 2; m++) {
        occupancy o = occupancy_of(&machines[m], s->threads, s->registers[m], shared);
        if (!s->registers[m]) continue;
        cell(3 + 3 * m, "%d", s->registers[m]);
        cell(4 + 3 * m, "%d x %d", o.blocks, o.warps / (o.blocks ? o.blocks : 1));
        cell(5 + 3 * m, "%s", o.limit);
    }
}

static void row_instructions(const shape *s) {
    const double *c = s->of, n = c[C_INSTRUCTIONS] - c[C_MOVES];
    double sync = c[C_COLLECTIVE] + c[C_BARRIER];
    double others = c[C_ARITHMETIC] + c[C_DOUBLES] + c[C_SPECIAL] + c[C_CONVERSION] + c[C_CONTROL]
                    + c[C_SHUFFLES] + sync + c[C_MMA];
    ratio(1, 0, n, c[C_WARPS]);
    percent(2, c[C_ARITHMETIC], n);
    percent(3, c[C_DOUBLES], n);
    percent(4, c[C_SPECIAL], n);
    percent(5, c[C_CONVERSION], n);
    percent(6, c[C_CONTROL], n);
    percent(7, c[C_SHUFFLES], n);
    percent(8, sync, n);
    percent(9, n - others, n);
    percent(10, c[C_MMA], n);
}

static void row_memory(const shape *s) {
    const double *c = s->of, kilobytes = 32e-3 / s->launches;
    ratio(1, 1, c[C_READ], c[C_LOADS]);
    ratio(2, 2, c[C_READ], c[C_IDEAL_READ]);
    ratio(3, 1, c[C_WRITTEN], c[C_STORES]);
    ratio(4, 2, c[C_WRITTEN], c[C_IDEAL_WRITTEN]);
    cell(5, "%.0f", kilobytes * (c[C_READ] + c[C_WRITTEN]));
    cell(6, "%.0f", kilobytes * c[C_UNIQUE_READ]);
    cell(7, "%.0f", kilobytes * c[C_UNIQUE_WRITTEN]);
    ratio(8, 2, c[C_WAVEFRONTS], c[C_IDEAL_WAVEFRONTS]);
}

/* More sectors (passes) than the fewest come first. */
static int by_excess(const void *a, const void *b) {
    const place *p = (const place *)a, *q = (const place *)b;
    double x = p->units - p->ideal, y = q->units - q->ideal;
    return x > y ? -1 : x < y;
}

/* Lists the places with more than 1.2 of the fewest sectors (passes), unless the others
   are below 0.1 % of all. */
static void table_places(void) {
    double all = 0;
    int i;
    qsort(places, (size_t)place_count, sizeof *places, by_excess);
    for (i = 0; i < place_count; i++) all += places[i].units;
    header("6. accesses|instruction|requests|units|/ ideal|line");
    for (i = 0; i < place_count; i++) {
        const place *p = &places[i];
        if (p->units < 1.2 * p->ideal || p->units - p->ideal < 1e-3 * all) continue;
        row_begin();
        cell(0, "%s", short_name(p->name));
        cell(1, "%s", p->instruction);
        cell(2, "%.0f", p->requests);
        cell(3, "%.0f", p->units);
        cell(4, "%.2f", p->units / p->ideal);
        cell(5, "%s", p->at + (strstr(p->at, "seqtx_cuda.cu:") == p->at ? 14 : 0));
    }
    if (table.rows > 1) print_table();
}

static void table_machines(void) {
    int m;
    header("GPU|multiprocessors|GHz|TB/s|bytes per clock of one");
    for (m = 0; m < MACHINES; m++) {
        const machine *g = &machines[m];
        row_begin();
        cell(0, "%s", g->name);
        cell(1, "%.0f", g->processors);
        cell(2, "%.2f", g->ghz);
        cell(3, "%.2f", g->bytes * 1e-12);
        cell(4, "%.1f", machine_bytes(g));
    }
    print_table();
}

static void say_meaning(void) {
    say("An interpreter counted what the kernels do, as nvcc compiled them to PTX\n"
        "(tests/ptx_host). ptxas still fuses and removes instructions: a tile of attention has\n"
        "a third fewer in the machine's code (sh tests/cuda/cuda_regs.sh --count). Caches,\n"
        "latencies and waits are not modelled. Kernels that take less than 1 %% of a step are\n"
        "only in the first table of a model, unless no model before it has them.\n\n"
        "1. Bounds. clocks: of one multiprocessor of an H100 per block, for the resource that\n"
        "   needs most, which the column of each GPU names. They are a lower limit of the time,\n"
        "   which grows with the number of blocks. share: of all kernels of the step (of those\n"
        "   that --kernel selects), without the matmuls of cublasLt.\n"
        "2. Resources of an H100, in %% of the one that needs most. mem: each 32-byte sector of\n"
        "   global memory once per launch. issue: warp instructions, 4 per clock; the units for\n"
        "   integers, of which a clock has only 2, have no column. smem: passes over the banks\n"
        "   of shared memory, 1. shfl: shuffles, 1. f64: 2. sfu: special functions, 1/2. mma: 1,\n"
        "   the rate of wgmma. lanes: active per instruction. split: divergent branches per\n"
        "   warp.\n"
        "3. Occupancy: bytes of shared memory per block, registers per thread, blocks per\n"
        "   multiprocessor x warps per block, and what allows no more. The shared memory is the\n"
        "   one that an H100 gets.\n"
        "4. Instructions per warp, without the moves that ptxas removes (mov, cvta, ld.param),\n"
        "   and %% of them by class: integers and floats, f64, special functions, conversions,\n"
        "   branches, shuffles, barriers and votes, loads and stores, mma.\n"
        "5. Memory. ld, st: sectors per load and store of a warp, and relative to the fewest\n"
        "   that the different bytes need. asked: KB of all requests of a launch, which memory\n"
        "   moves if no cache helps. read, written: KB, each sector once, which it moves at\n"
        "   least. banks: passes, relative to those without conflicts.\n"
        "6. Accesses that need more than 1.2 of the fewest sectors (passes), with their lines in\n"
        "   seqtx_cuda.cu (and where they are inlined), unless they are below 0.1 %% of all.\n\n");
    table_machines();
}

static void tables(const char *path, const char *title) {
    read_launches(path);
    if (!shape_count) return;
    read_registers();
    choose_shapes();
    say("## %s\n\n", title);
    table_of("1. bounds|share|launches|blocks|clocks|A100|H100|H200", IN_FIRST_TABLE, row_bounds);
    table_of("2. resources|mem|issue|smem|shfl|f64|sfu|mma|lanes|split", IN_ALL_TABLES,
             row_resources);
    table_of("3. occupancy|threads|shared|A100 regs|blocks|by|H100 regs|blocks|by", IN_ALL_TABLES,
             row_occupancy);
    table_of("4. instructions|warp|alu|f64|sfu|cvt|bra|shfl|sync|mem|mma", IN_ALL_TABLES,
             row_instructions);
    table_of("5. memory|ld|/ ideal|st|/ ideal|asked|read|written|banks", IN_ALL_TABLES,
             row_memory);
    table_places();
}

int main(int argc, char **argv) {
    const char *title = NULL;
    int i, taken, meaning = 0;
    const option options[] = {
        OPTION_TEXT("--kernel", &only),         OPTION_FLAG("--shapes", &all_shapes),
        OPTION_TEXT("--title", &title),         OPTION_FLAG("--meaning", &meaning),
        OPTION_TEXT("--regs", &registers_path), OPTION_TEXT("--append", &report_path),
        OPTION_END};
    program = "count_kernels";
    for (i = 1; i < argc; i += taken) {
        taken = option_take(options, argc, argv, i);
        if (meaning) say_meaning();
        meaning = 0;
        if (taken) continue;
        if (argv[i][0] == '-')
            return option_unknown(argv[i], "count_kernels [--append FILE] [--kernel TEXT] "
                                           "[--shapes] [--regs FILE] [--meaning] [--title TEXT] "
                                           "FILE ..\n");
        tables(argv[i], title ? title : argv[i]);
        taken = 1;
    }
    if (only && !seen_count) die("no kernel with the text of --kernel in its name was launched");
    return 0;
}
