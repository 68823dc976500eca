/* ranks_model.c - estimates how much data the data-parallel training of two presets
   (enwik8: 12 layers of width 512, enwik8_large: 24 layers of width 768) exchanges, how
   long this takes on machines with several GPUs, and how much of this time the backward
   pass hides, bucket by bucket. The program prints its assumptions with the tables.
   Nothing is run on a GPU or measured.

       cc -O2 bench/trainers/ranks_model.c -o build/ranks_model -lm
       build/ranks_model [--trainer build/train_attn_span]

   --trainer compares the parameter counts with those that the trainer's --dry-run
   prints, and the exit code is 1 if they differ. */
#define _DEFAULT_SOURCE
#include "../report.h"
#include "../cuda/cuda_model.h"


// >>assumptions

/* bytes/s per direction that a ring reaches over NVLink, which has a total of 900 GB/s
   in both directions */
static const double NVLINK = 0.8 * 450e9;
static const double NET_USABLE = 0.9; /* usable fraction of a network's nominal rate */
/* seconds. HOP_INSIDE, HOP_NET: per step of a ring or tree, inside a machine and
   between machines. CALL: per call of any size */
static const double HOP_INSIDE = 2e-6, HOP_NET = 6e-6, CALL = 10e-6;

/* GPUS: GPUs per machine. BUCKET: elements per bucket (stx_group_desc). WHOLE: streams
   of the planned steps */
enum { GPUS = 8, BUCKET = 1 << 20, WHOLE = 64 };

/* planned: expected milliseconds per step of 64 streams on one H200, in bf16, with
   learned spans and attention by mma.sync */
typedef struct model {
    const char *config, *preset;
    double planned;
} model;

static const model models[] = {{"12x512", "enwik8", 31}, {"24x768", "enwik8_large", 129}};

enum { MODELS = sizeof models / sizeof *models };

/* nics: network adapters per machine; gbit: rate of each in Gbit/s */
typedef struct net {
    const char *name;
    double gbit;
    int nics;
} net;

static const net nets[] = {{"NVLink", 0, 0},
                           {"200 Gb/s per machine", 200, 1},
                           {"400 Gb/s per machine", 400, 1},
                           {"200 Gb/s per GPU", 200, GPUS},
                           {"400 Gb/s per GPU", 400, GPUS}};

enum { NETS = sizeof nets / sizeof *nets };


// >>compute

/* Seconds of the phases of a step on one GPU. half[l][0] and half[l][1]: backward pass
   of the feed-forward half and then of the attention half of layer l */
typedef struct phases {
    double forward, head, half[64][2], embedding, update, backward, all;
    size_t layers;
} phases;

static config with_streams(const model *m, double streams) {
    int i;
    config c = configs[0];
    for (i = 0; i < CONFIGS; i++)
        if (!strcmp(configs[i].name, m->config)) c = configs[i];
    c.batch = (size_t)streams;
    return c;
}

static int is_backward(const char *name) {
    return strstr(name, "backward") || !strncmp(name, "gradients", 9);
}

static int is_inner(const char *name) {
    return strstr(name, "W1") || strstr(name, "relu");
}

static double roofline(const model *m, double streams) {
    config c = with_streams(m, streams);
    work w;
    work_count(&w, &c);
    return work_sum(&w, -1, WORK_MS) * 1e-3;
}

/* Returns the number of nodes of a step's CUDA graph (cuda_model.h). Each takes
   PLAN_NODE microseconds. */
static double nodes(const config *c) {
    double n = 0;
    work w;
    int i;
    work_count(&w, c);
    for (i = 0; i < w.rows; i++) n += w.row[i].calls;
    return n;
}

static phases step_of(const model *m, double streams) {
    config c = with_streams(m, streams);
    double launch = 1e-6 * PLAN_NODE * nodes(&c),
           /* planned time / roofline */
           slow = (m->planned * 1e-3 - launch) / roofline(m, WHOLE);
    phases p;
    work w;
    size_t l;
    int i;
    memset(&p, 0, sizeof p);
    p.layers = c.layers;
    for (l = 0; l < c.layers; l++) {
        memset(&w, 0, sizeof w);
        work_layer(&w, &c, l);
        for (i = 0; i < w.rows; i++)
            *(is_backward(w.row[i].name) ? &p.half[l][!is_inner(w.row[i].name)]
                                         : &p.forward) += slow * 1e-3 * w.row[i].ms;
        for (i = 0; i < 2; i++) p.half[l][i] += launch / 3 / (double)c.layers;
    }
    p.forward += launch / 3;
    work_count(&w, &c);
    for (i = 0; i < w.rows; i++) {
        double t = slow * 1e-3 * w.row[i].ms;
        if (!strncmp(w.row[i].name, "output layer", 12))
            *(is_backward(w.row[i].name) ? &p.head : &p.forward) += t;
        if (!strncmp(w.row[i].name, "cross", 5)) {
            p.forward += t / 2;
            p.head += t / 2;
        }
        if (!strcmp(w.row[i].name, "embedding")) {
            p.forward += t / 2;
            p.embedding += t / 2;
        }
        if (w.row[i].group == UPDATE) p.update += t;
        if (!strncmp(w.row[i].name, "sums", 4))
            for (l = 0; l < 2 * c.layers; l++) p.half[l / 2][l % 2] += t / 2 / (double)c.layers;
    }
    for (l = 0; l < c.layers; l++) p.backward += p.half[l][0] + p.half[l][1];
    p.backward += p.head + p.embedding;
    p.all = p.forward + p.backward + p.update;
    return p;
}


// >>buckets

/* size: elements of each parameter, in the order of stx_span_params. ready: time at
   which its gradient is complete, in seconds after the start of the backward pass */
typedef struct gradients {
    double size[64 * 11 + 4], ready[64 * 11 + 4], all;
    int n;
} gradients;

static void add_gradient(gradients *g, double size, double ready) {
    g->size[g->n] = size;
    g->ready[g->n++] = ready;
    g->all += size;
}

static void list_gradients(gradients *g, const config *c, const phases *p) {
    double d = (double)c->dim, f = (double)c->inner, at[64][2], t = p->head;
    size_t l;
    int i;
    g->n = 0;
    g->all = 0;
    for (l = c->layers; l-- > 0;)
        for (i = 0; i < 2; i++) at[l][i] = t += p->half[l][i];
    /* all layers use key_pe, so its gradient is complete only after the last layer */
    add_gradient(g, d / (double)c->heads * (double)c->span, t);
    add_gradient(g, VOCAB * d, t + p->embedding);
    add_gradient(g, VOCAB * d + VOCAB, p->head);
    for (l = 0; l < c->layers; l++) {
        add_gradient(g, (double)c->heads, at[l][1]);
        for (i = 0; i < 4; i++) add_gradient(g, d * d, at[l][1]);
        add_gradient(g, 2 * d, at[l][1]);
        add_gradient(g, d * f + f, at[l][0]);
        add_gradient(g, d * f + 3 * d, at[l][0]);
    }
}


// >>exchange

/* Returns the bytes per second that a machine can send while it receives at the same
   rate. */
static double rate_of(const net *w) {
    return w->nics * w->gbit / 8 * 1e9 * NET_USABLE;
}

/* Returns the time in seconds of an all-reduce of n elements by the fastest method.
   *how receives the name of this method. The methods are a ring over all GPUs, and two
   levels: NVLink inside each machine, then a ring or a tree between machines, in which
   each GPU sums 1/GPUS of the elements. */
static double all_reduce(double n, int gpus, const net *w, const char **how) {
    double bytes = 4 * n, N = gpus, machines = N / GPUS, inside, ring, by_ring, by_tree, best,
           lan = rate_of(w);
    if (gpus <= GPUS) {
        *how = "ring";
        return CALL + 2 * (N - 1) / N * bytes / NVLINK + 2 * (N - 1) * HOP_INSIDE;
    }
    inside = 2.0 * (GPUS - 1) / GPUS * bytes / NVLINK + 2 * (GPUS - 1) * HOP_INSIDE;
    ring = 2 * (N - 1) / N * bytes / (lan < NVLINK ? lan : NVLINK) + 2 * (N - 1) * HOP_NET;
    by_ring = inside + 2 * (machines - 1) / machines * bytes / lan + 2 * (machines - 1) * HOP_NET;
    by_tree = inside + 2 * bytes / lan + 2 * ceil(log2(machines)) * HOP_NET;
    best = ring;
    *how = "ring";
    if (by_ring < best) {
        best = by_ring;
        *how = "machines, ring";
    }
    if (by_tree < best) {
        best = by_tree;
        *how = "machines, tree";
    }
    return CALL + best;
}

typedef struct exchange {
    double wire, exposed;
} exchange;

/* Computes the timing of the gradient exchange. Buckets are sent one at a time, starting
   at the end of the parameter list. Each is sent as soon as all its gradients are
   complete and the previous bucket has arrived. `wire` is the total transfer time;
   `exposed` is the part of it after the end of the backward pass. */
static exchange overlap(const gradients *g, const phases *p, int gpus, const net *w,
                        double bucket) {
    exchange e = {0, 0};
    double hi = g->all, lo, end = 0;
    const char *how;
    for (lo = floor((hi - 1) / bucket) * bucket; hi > 0; hi = lo, lo -= bucket) {
        double from = 0, ready = 0, t = all_reduce(hi - lo, gpus, w, &how);
        int i;
        for (i = 0; i < g->n; from += g->size[i++])
            if (from < hi && from + g->size[i] > lo && g->ready[i] > ready) ready = g->ready[i];
        end = (end > ready ? end : ready) + t;
        e.wire += t;
    }
    e.exposed = gpus > 1 && end > p->backward ? end - p->backward : 0;
    return e;
}


// >>tables

static void say_assumptions(void) {
    config c[MODELS];
    int i;
    for (i = 0; i < MODELS; i++) c[i] = with_streams(models + i, WHOLE);
    say("## Assumptions\n\n");
    say("- The time of a step on one H200 is the plan for 64 streams of 512 tokens in bfloat16, "
        "learned spans, attention\n  by mma.sync: %.0f ms of 12x512, %.0f ms of 24x768. That plan "
        "was not measured either. With fewer streams:\n  %.1f us per node of the step's CUDA "
        "graph (%.0f and %.0f nodes with 64 streams, `cuda_model.h`), and the rest\n  in "
        "proportion to its roofline. Matmuls that no longer fill the GPU are slower; see \"Streams "
        "per GPU\".\n",
        models[0].planned, models[1].planned, PLAN_NODE, nodes(&c[0]), nodes(&c[1]));
    say("- Forward, backward and update share that time in proportion to their rooflines. "
        "Gradients are floats, in buckets\n  of 1 Mi elements (4 Mi where stated), from the end "
        "of the parameter list. A bucket is sent when backward has\n  completed it and the "
        "previous one has arrived. What has not arrived when backward ends is exposed: the\n"
        "  update waits for it.\n");
    say("- NVLink: 900 GB/s per GPU both ways together, 450 each way, of which an exchange uses "
        "%.0f. Network: %.0f %% of its\n  nominal rate; \"per machine\" is one adapter for 8 "
        "GPUs, \"per GPU\" one for each. A step of a ring or tree takes\n  %.0f us inside a "
        "machine and %.0f between two, a call of any size %.0f us. These five values are "
        "assumed.\n",
        NVLINK * 1e-9, NET_USABLE * 100, HOP_INSIDE * 1e6, HOP_NET * 1e6, CALL * 1e6);
    say("- An all-reduce of n bytes over N GPUs: a ring, 2 (N-1)/N n / rate + 2 (N-1) steps; or "
        "by machines: sums of 1/8\n  each inside, and back (2 x 7/8 n / NVLink + 14 steps), and "
        "between M machines a ring (2 (M-1)/M n / rate +\n  2 (M-1) steps) or a tree (2 n / rate "
        "+ 2 log2 M steps). The fastest counts, as NCCL chooses. The parts follow one\n  another; "
        "NCCL overlaps those of large buckets.\n");
    say("- Not counted: multiprocessors and memory bandwidth that NCCL takes from backward, "
        "waiting for the slowest rank,\n  other traffic on the network, reading text, evaluation, "
        "checkpoints.\n\n");
}

static void table_models(void) {
    static const double share[] = {64, 8, 1};
    int i, k;
    say("## What a step does and exchanges\n\n");
    header("model|preset|parameters|gradient MB|buckets|streams per GPU|forward ms|backward ms|"
           "update ms|together");
    for (i = 0; i < MODELS; i++)
        for (k = 0; k < 3; k++) {
            config c = with_streams(&models[i], share[k]);
            phases p = step_of(&models[i], share[k]);
            row_begin();
            if (!k) {
                cell(0, "%s", c.name);
                cell(1, "%s", models[i].preset);
                cell(2, "%.0f", parameters(&c));
                cell(3, "%.0f", 4e-6 * parameters(&c));
                cell(4, "%.0f", ceil(parameters(&c) / BUCKET));
            }
            cell(5, "%.0f", share[k]);
            cell(6, "%.2f", 1e3 * p.forward);
            cell(7, "%.2f", 1e3 * p.backward);
            cell(8, "%.2f", 1e3 * p.update);
            cell(9, "%.2f", 1e3 * p.all);
        }
    print_table();
}

static void table_speed(const model *m) {
    static const struct {
        int gpus, first, last; /* first, last: indices in nets */
    } kind[] = {{8, 0, 0}, {64, 1, 4}, {1024, 1, 4}};

    static const double share[] = {1, 8, 64}, bucket[] = {BUCKET, 4.0 * BUCKET};
    const double alone = WHOLE / step_of(m, WHOLE).all;
    int i, k, s, b;
    say("## %s\n\n"
        "Speed: tokens per second, relative to one GPU with 64 streams. Hidden: the part of the "
        "exchange that backward hides.\nEfficiency: relative to the same step without an exchange. "
        "The last three: with buckets of 4 Mi elements.\n\n",
        m->config);
    header("GPUs|network|streams per GPU|whole batch|step alone ms|exchange ms|hidden|exposed ms|"
           "efficiency|speed|exposed ms|efficiency|speed");
    for (i = 0; i < 3; i++)
        for (k = kind[i].first; k <= kind[i].last; k++)
            for (s = 0; s < 3; s++) {
                config c = with_streams(m, share[s]);
                phases p = step_of(m, share[s]);
                gradients g;
                list_gradients(&g, &c, &p);
                row_begin();
                cell(0, "%d", kind[i].gpus);
                cell(1, "%s", nets[k].name);
                cell(2, "%.0f", share[s]);
                cell(3, "%.0f", share[s] * kind[i].gpus);
                cell(4, "%.2f", 1e3 * p.all);
                for (b = 0; b < 2; b++) {
                    exchange e = overlap(&g, &p, kind[i].gpus, &nets[k], bucket[b]);
                    int at = 7 + 3 * b;
                    if (!b) {
                        cell(5, "%.2f", 1e3 * e.wire);
                        cell(6, "%.0f %%", 100 * (1 - e.exposed / e.wire));
                    }
                    cell(at, "%.2f", 1e3 * e.exposed);
                    cell(at + 1, "%.0f %%", 100 * p.all / (p.all + e.exposed));
                    cell(at + 2, "%.1f", share[s] * kind[i].gpus / (p.all + e.exposed) / alone);
                }
            }
    print_table();
}

static void table_buckets(void) {
    static const double bucket[] = {1, 4, 16};

    static const struct {
        int gpus, net;
    } at[] = {{8, 0}, {64, 4}, {1024, 4}};

    int i, k, b;
    say("## Size of the buckets\n\n"
        "8 streams per GPU; 64 and 1024 GPUs with 400 Gb/s each. Exchange and its exposed part, "
        "ms, for buckets of 1, 4 and\n16 Mi elements (`stx_group_desc.bucket`).\n\n");
    header("model|GPUs|1 Mi: exchange|exposed|4 Mi: exchange|exposed|16 Mi: exchange|exposed");
    for (i = 0; i < MODELS; i++)
        for (k = 0; k < 3; k++) {
            config c = with_streams(&models[i], 8);
            phases p = step_of(&models[i], 8);
            gradients g;
            list_gradients(&g, &c, &p);
            row_begin();
            cell(0, "%s", models[i].config);
            cell(1, "%d", at[k].gpus);
            for (b = 0; b < 3; b++) {
                exchange e = overlap(&g, &p, at[k].gpus, &nets[at[k].net], bucket[b] * (1 << 20));
                cell(2 + 2 * b, "%.2f", 1e3 * e.wire);
                cell(3 + 2 * b, "%.2f", 1e3 * e.exposed);
            }
        }
    print_table();
}

static void table_latency(void) {
    static const int gpus[] = {64, 1024};
    static const double mi[] = {1, 16};
    int k, b;
    say("## One all-reduce: ring and tree\n\n"
        "400 Gb/s per GPU. Latency: the steps of it that take as long for one element. ms.\n\n");
    header("GPUs|Mi elements|only bytes|ring over all|latency|fastest|latency|which");
    for (k = 0; k < 2; k++)
        for (b = 0; b < 2; b++) {
            const net *w = &nets[4];
            double N = gpus[k], n = mi[b] * (1 << 20),
                   rate = rate_of(w) < NVLINK ? rate_of(w) : NVLINK;
            const char *how, *tiny_how;
            double best = all_reduce(n, gpus[k], w, &how),
                   least = all_reduce(1, gpus[k], w, &tiny_how);
            row_begin();
            cell(0, "%d", gpus[k]);
            cell(1, "%.0f", mi[b]);
            cell(2, "%.3f", 1e3 * 8 * (N - 1) / N * n / rate);
            cell(3, "%.2f", 1e3 * (CALL + 8 * (N - 1) / N * n / rate + 2 * (N - 1) * HOP_NET));
            cell(4, "%.2f", 1e3 * (CALL + 2 * (N - 1) * HOP_NET));
            cell(5, "%.3f", 1e3 * best);
            cell(6, "%.3f", 1e3 * least);
            cell(7, "%s", how);
        }
    print_table();
}

static void table_share(void) {
    enum { SMS = 132, TILE = 128 };

    static const double share[] = {1, 2, 4, 8, 16, 64};
    int i, k;
    say("## Streams per GPU\n\n"
        "Tiles of 128 x 128 of the smallest matmuls of a layer (queries: rows of the block by d). "
        "An H200 has %d\nmultiprocessors; with fewer tiles some are idle. Step: by the "
        "assumptions above, which ignore that. Time per\nstream: relative to 64 streams. Text per "
        "stream: of the 90 million training tokens of enwik8; a memory of 8192\ntokens fills in "
        "16 blocks.\n\n",
        SMS);
    header("model|streams per GPU|rows|tiles|fill the GPU|step ms|time per stream|"
           "1024 GPUs: whole batch|M tokens per step|blocks of text per stream");
    for (i = 0; i < MODELS; i++)
        for (k = 0; k < 6; k++) {
            config c = with_streams(&models[i], share[k]);
            double rows = share[k] * (double)c.block,
                   count = ceil(rows / TILE) * ceil((double)c.dim / TILE);
            double t = step_of(&models[i], share[k]).all;
            row_begin();
            cell(0, "%s", models[i].config);
            cell(1, "%.0f", share[k]);
            cell(2, "%.0f", rows);
            cell(3, "%.0f", count);
            cell(4, "%.0f %%", 100 * (count < SMS ? count / SMS : 1));
            cell(5, "%.2f", 1e3 * t);
            cell(6, "%.2f", t / share[k] * WHOLE / step_of(&models[i], WHOLE).all);
            cell(7, "%.0f", share[k] * 1024);
            cell(8, "%.1f", rows * 1024 * 1e-6);
            cell(9, "%.1f", 90e6 / (rows * 1024));
        }
    print_table();
}

static void table_memory(void) {
    static const struct {
        const char *name;
        double p;
    } of[] = {{"24x768", 208988608}, {"SRU++ lm1b-large-k5", 465318339}};

    static const double ranks[] = {1, 8, 64, 1024};
    int i, k;
    say("## Memory, and --shard\n\n"
        "GB per GPU in bfloat16: parameters 4 bytes and their bfloat16 copies 2, gradients 4, two "
        "states (Adam; Adagrad has\none) 8. Sharded: a rank keeps the states of 1/N of the "
        "parameters, updates these, and sends them to the others. The\nbytes exchanged are the "
        "same: half an all-reduce for gradients and half, which backward does not hide, for\n"
        "parameters. Update: 30 bytes per parameter at 80 %% of %.1f TB/s. Activations and "
        "memories of streams are not\nincluded.\n\n",
        ROOF_BYTES * 1e-12);
    header("model|parameters M|GPUs|parameters|gradients|states|together|states sharded|together|"
           "update ms|sharded");
    for (i = 0; i < 2; i++)
        for (k = 0; k < 4; k++) {
            double p = of[i].p * 1e-9, N = ranks[k],
                   update = 1e3 * 30 * of[i].p / (0.8 * ROOF_BYTES);
            row_begin();
            cell(0, "%s", of[i].name);
            cell(1, "%.0f", p * 1e3);
            cell(2, "%.0f", N);
            cell(3, "%.2f", 6 * p);
            cell(4, "%.2f", 4 * p);
            cell(5, "%.2f", 8 * p);
            cell(6, "%.2f", 18 * p);
            cell(7, "%.2f", 8 * p / N);
            cell(8, "%.2f", 10 * p + 8 * p / N);
            cell(9, "%.2f", update);
            cell(10, "%.2f", update / N);
        }
    print_table();
}

/* Returns 1 if the trainer reports the same parameter counts. */
static int compare(const char *trainer) {
    int i, ok = 1;
    for (i = 0; i < MODELS; i++) {
        config c = with_streams(&models[i], WHOLE);
        char command[512];
        double n = 0;
        FILE *f;
        snprintf(command, sizeof command, "'%s' --preset %s --vocab %d --dry-run", trainer,
                 models[i].preset, VOCAB);
        f = popen(command, "r");
        if (!f || fscanf(f, "%lf", &n) != 1 || fabs(n - parameters(&c)) > 0.5) {
            fprintf(stderr, "ranks_model: %s: expected %.0f parameters, got %.0f from %s\n", c.name,
                    parameters(&c), n, command);
            ok = 0;
        }
        if (f) pclose(f);
    }
    return ok;
}

int main(int argc, char **argv) {
    const char *trainer = NULL;
    const option options[] = {OPTION_TEXT("--trainer", &trainer), OPTION_END};
    int i, taken;
    program = "ranks_model";
    for (i = 1; i < argc; i += taken) {
        taken = option_take(options, argc, argv, i);
        if (!taken)
            return option_unknown(argv[i], "ranks_model [--trainer build/train_attn_span]\n");
    }
    if (trainer && !compare(trainer)) return 1;
    say_assumptions();
    table_models();
    for (i = 0; i < MODELS; i++) table_speed(&models[i]);
    table_latency();
    table_buckets();
    table_share();
    table_memory();
    return 0;
}
