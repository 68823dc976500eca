/* remember.c - keeps a model's memory between calls, as an agent or a server does that
   runs for long and is started again.
       cc -O2 remember.c -lm -o remember                        beside the headers; in the source tree with -I.
       echo "the cat sat on the mat" | ./remember model.safetensors memory.safetensors

   It reads lines from standard input. For each it says how well the model foresaw it
   (bits per byte) and how it would go on, and remembers both, after all that came
   before, also in earlier calls: the memory is saved behind every line, whole or not
   at all. Without a model file it trains a small one on the file that is named third
   (this one's source) and keeps it. */
#define SEQTX_IMPLEMENTATION
#include "seqtx_attn_span.h"
#include "seqtx_text.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LINE = 4096, ANSWER = 40 };

typedef struct mind {
    stx_ctx *x;
    stx_span *model;
    stx_span_state *memory; /* what it has read, but for */
    /* ... the last token, after which the next one is to be foreseen */
    uint64_t last;
    /* the checksum of the model's file: a memory is of one model */
    char identity[32];
} mind;

static void train(mind *a, const char *path, int steps) {
    enum { B = 4, T = 64 };

    static int32_t in[B * T], next[B * T];
    stx_ctx *x = a->x;
    stx_vocab *bytes = stx_vocab_build(x, NULL, NULL, 0, 0);
    stx_corpus *text = stx_corpus_open(x, bytes, path, 0, 0);
    stx_batches_desc bd = {0};
    stx_optim_desc od = {0};
    bd.B = B;
    bd.T = T;
    stx_batches *batches = stx_batches_create(x, text, &bd);
    stx_optim *optim = stx_optim_create(stx_span_params(a->model), &od);
    stx_span_state *read = stx_span_state_create(a->model, B);
    for (int step = 1; step <= steps && stx_ok(x); step++) {
        if (stx_batches_next(batches, in, next) == STX_BATCH_FRESH) stx_span_state_reset(read);
        stx_begin(x, STX_TRAIN);
        stx_backward(x, stx_span_loss(a->model, stx_tokens(x, in, B, T), stx_tokens(x, next, B, T),
                                      read, read));
        stx_optim_step(optim, 0.003);
    }
    stx_batches_free(batches);
    stx_corpus_close(text);
    stx_vocab_free(bytes);
}

static int there(const char *path) {
    FILE *f = fopen(path, "rb");
    if (f) fclose(f);
    return f != NULL;
}

/* 1, or 0 and the context's error */
static int load(mind *a, const char *path, int memory) {
    stx_file *f = stx_file_open(a->x, path);
    int ok = f && stx_file_verify(f);
    const char *of = ok ? stx_file_meta(f, memory ? "model" : "seal") : NULL;
    if (ok && memory && of && strcmp(of, a->identity)) {
        stx_fail(a->x, STX_ERR_ARG,
                 "%s is the memory of another model: give that one, or another "
                 "name for a new memory",
                 path);
        ok = 0;
    }
    if (ok && !memory) {
        snprintf(a->identity, sizeof a->identity, "%s", of);
        ok = stx_params_load(stx_span_params(a->model), f, "");
    }
    if (ok && memory)
        ok = stx_span_state_load(a->memory, f, "memory.")
             && stx_file_meta_u64(a->x, f, "last", &a->last);
    stx_file_close(f);
    return ok;
}

static int save(const mind *a, const char *path, int memory) {
    stx_writer *w = stx_writer_create(a->x);
    if (!memory)
        stx_params_save(w, stx_span_params(a->model), "");
    else {
        stx_span_state_save(w, a->memory, "memory.");
        stx_writer_meta_u64(w, "last", a->last);
        stx_writer_meta(w, "model", a->identity);
    }
    stx_writer_checksum(w);
    return stx_writer_finish(w, path); /* after a failure above it writes nothing */
}

/* Reads n bytes; how many bits each took, on average */
static double hear(mind *a, const char *text, size_t n) {
    static int32_t in[LINE + 1];
    in[0] = (int32_t)a->last;
    for (size_t i = 0; i < n; i++) in[i + 1] = (unsigned char)text[i];
    stx_begin(a->x, STX_EVAL);
    double nats = stx_item(a->x,
                           stx_span_loss(a->model, stx_tokens(a->x, in, 1, n),
                                         stx_tokens(a->x, in + 1, 1, n), a->memory, a->memory));
    a->last = (unsigned char)text[n - 1];
    return nats / 0.69314718;
}

/* The likeliest byte after what was read, which is read, too. (A forward of one token.
   Where texts are long, stx_span_gen_feed is faster, for it keeps keys and values; but
   its memory is not saved.) */
static int say(mind *a) {
    int32_t in = (int32_t)a->last;
    stx_real log_p[256];
    stx_sampling likeliest = {0};
    stx_begin(a->x, STX_EVAL);
    stx_tensor *p = stx_span_log_probs(a->model,
                                       stx_span_forward(a->model, stx_tokens(a->x, &in, 1, 1),
                                                        a->memory, a->memory));
    if (!p) return '\n';
    stx_get(a->x, p, log_p);
    a->last = (uint64_t)stx_sample(&likeliest, 0, log_p, 256, NULL);
    return (int)a->last;
}

int main(int argc, char **argv) {
    static char line[LINE];
    mind a = {0};
    stx_span_desc d = {0};
    if (argc < 3 || (argc > 4 && atoi(argv[4]) < 1)) {
        fprintf(stderr, "usage: remember MODEL MEMORY [TEXT [STEPS]]\n");
        return 2;
    }
    a.x = stx_create(NULL);
    a.last = '\n';
    d.vocab = 256;
    d.layers = 2;
    d.dim = 64;
    d.heads = 4;
    d.span = 512;
    a.model = stx_span_create(a.x, &d);
    if (!there(argv[1])) {
        train(&a, argc > 3 ? argv[3] : "examples/remember.c", argc > 4 ? atoi(argv[4]) : 400);
        save(&a, argv[1], 0);
    }
    load(&a, argv[1], 0);
    a.memory = stx_span_state_create(a.model, 1);
    if (there(argv[2])) load(&a, argv[2], 1);
    while (stx_ok(a.x) && fgets(line, sizeof line, stdin)) {
        if (!*line) continue; /* it begins with a zero byte: not text */
        printf("%.4f\t", hear(&a, line, strlen(line)));
        for (int i = 0, c = 0; i < ANSWER && c != '\n'; i++) {
            c = say(&a);
            if (c != '\n') putchar(c);
        }
        putchar('\n');
        fflush(stdout);
        save(&a, argv[2], 1);
    }
    if (!stx_ok(a.x)) fprintf(stderr, "remember: %s\n", stx_error(a.x));
    int ok = stx_ok(a.x);
    stx_destroy(a.x);
    return !ok;
}
