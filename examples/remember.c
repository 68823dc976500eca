/* remember.c - keeps a model's memory across restarts, as a server or an agent would.

   Build it next to the headers (in the source tree, add -I.):
       cc -O2 remember.c -lm -o remember
       echo "the cat sat on the mat" | ./remember model.safetensors memory.safetensors

   For each line of standard input it prints how many bits per byte the model needed to
   predict the line, and the most likely continuation. The line and its continuation enter
   the memory, which also includes everything that earlier processes read. The memory is
   saved atomically after every line. If the model file does not exist, a small model is
   trained on the file in the third argument (default: this source file) and saved. */
#define SEQTX_IMPLEMENTATION
#include "seqtx_attn_span.h"
#include "seqtx_text.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LINE = 4096, ANSWER = 40 };

typedef struct agent {
    stx_ctx *x;
    stx_span *model;
    stx_span_state *memory; /* memory of all tokens but the last */
    uint64_t last;          /* the last token, which the model reads next */
    char identity[32];      /* checksum of the model file: a memory belongs to one model */
} agent;

static void train(agent *a, const char *path, int steps) {
    enum { B = 4, T = 64 };

    static int32_t in[B * T], next[B * T];
    stx_ctx *x = a->x;
    stx_vocab *bytes = stx_vocab_build(x, NULL, NULL, 0, 0);
    stx_corpus *text = stx_corpus_open(x, bytes, path, 0, 0);
    stx_batches_desc bd = {0};
    bd.B = B;
    bd.T = T;
    stx_batches *batches = stx_batches_create(x, text, &bd);
    stx_optim_desc od = {0};
    stx_optim *optim = stx_optim_create(stx_span_params(a->model), &od);
    stx_span_state *memory = stx_span_state_create(a->model, B);

    for (int step = 1; step <= steps && stx_ok(x); step++) {
        if (stx_batches_next(batches, in, next) == STX_BATCH_FRESH) stx_span_state_reset(memory);
        stx_begin(x, STX_TRAIN);
        stx_tensor *nll = stx_span_loss(a->model, stx_tokens(x, in, B, T),
                                        stx_tokens(x, next, B, T), memory, memory);
        stx_backward(x, nll);
        stx_optim_step(optim, 0.003);
    }
    stx_batches_free(batches);
    stx_corpus_close(text);
    stx_vocab_free(bytes);
}

static int file_exists(const char *path) {
    FILE *f = fopen(path, "rb");
    if (f) fclose(f);
    return f != NULL;
}

/* Files: each function returns 1, or sets the context's error and returns 0. */

/* Like stx_span_open, and also reads the checksum. */
static int model_open(agent *a, const char *path) {
    stx_file *f = stx_file_open(a->x, path);
    int ok = f && stx_file_verify(f);
    if (ok) snprintf(a->identity, sizeof a->identity, "%s", stx_file_meta(f, "seal"));
    a->model = ok ? stx_model_read(a->x, stx_span_family(), f) : NULL;
    stx_file_close(f);
    return a->model != NULL;
}

static int memory_save(const agent *a, const char *path) {
    stx_writer *w = stx_writer_create(a->x);
    stx_span_state_save(w, a->memory, "memory.");
    stx_writer_meta_u64(w, "last", a->last);
    stx_writer_meta(w, "model", a->identity);
    stx_writer_checksum(w);
    return stx_writer_finish(w, path); /* writes nothing if a call above failed */
}

static int memory_load(agent *a, const char *path) {
    stx_file *f = stx_file_open(a->x, path);
    int ok = f && stx_file_verify(f);
    const char *model = ok ? stx_file_meta(f, "model") : NULL;
    if (model && strcmp(model, a->identity)) {
        stx_fail(a->x, STX_ERR_ARG,
                 "%s is the memory of another model: give that model, or name a new memory file",
                 path);
        ok = 0;
    }
    ok = ok && stx_span_state_load(a->memory, f, "memory.")
         && stx_file_meta_u64(a->x, f, "last", &a->last);
    stx_file_close(f);
    return ok;
}

/* Feeds n bytes to the model and returns the mean number of bits per byte. */
static double read_text(agent *a, const char *text, size_t n) {
    static int32_t tokens[LINE + 1];
    stx_ctx *x = a->x;
    tokens[0] = (int32_t)a->last;
    for (size_t i = 0; i < n; i++) tokens[i + 1] = (unsigned char)text[i];
    stx_begin(x, STX_EVAL);
    stx_tensor *nll = stx_span_loss(a->model, stx_tokens(x, tokens, 1, n),
                                    stx_tokens(x, tokens + 1, 1, n), a->memory, a->memory);
    a->last = (unsigned char)text[n - 1];
    return stx_item(x, nll) / 0.69314718;
}

/* Returns the most likely next byte, which becomes the model's next input. Each byte
   requires a forward pass over one token. For long texts, stx_span_gen_feed is faster,
   because it caches keys and values, but its memory cannot be saved. */
static int generate_byte(agent *a) {
    int32_t in = (int32_t)a->last;
    stx_real log_p[256];
    stx_sampling most_likely = {0};
    stx_begin(a->x, STX_EVAL);
    stx_tensor *h = stx_span_forward(a->model, stx_tokens(a->x, &in, 1, 1), a->memory, a->memory);
    stx_tensor *p = stx_span_log_probs(a->model, h);
    if (!p) return '\n';
    stx_get(a->x, p, log_p);
    a->last = (uint64_t)stx_sample(&most_likely, 0, log_p, 256, NULL);
    return (int)a->last;
}

int main(int argc, char **argv) {
    static char line[LINE];
    agent a = {0};
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
    if (!file_exists(argv[1])) {
        a.model = stx_span_create(a.x, &d);
        train(&a, argc > 3 ? argv[3] : "examples/remember.c", argc > 4 ? atoi(argv[4]) : 400);
        stx_span_save(a.model, argv[1]);
    }
    model_open(&a, argv[1]);
    a.memory = stx_span_state_create(a.model, 1);
    if (file_exists(argv[2])) memory_load(&a, argv[2]);

    while (stx_ok(a.x) && fgets(line, sizeof line, stdin)) {
        if (!*line) continue; /* the line starts with a zero byte: not text */
        printf("%.4f\t", read_text(&a, line, strlen(line)));
        for (int i = 0, c = 0; i < ANSWER && c != '\n'; i++) {
            c = generate_byte(&a);
            if (c != '\n') putchar(c);
        }
        putchar('\n');
        if (fflush(stdout) || ferror(stdout))
            stx_fail(a.x, STX_ERR_IO, "the answer cannot be written"); /* prevents memory_save */
        memory_save(&a, argv[2]);
    }

    int ok = stx_ok(a.x);
    if (!ok) fprintf(stderr, "remember: %s\n", stx_error(a.x));
    stx_destroy(a.x);
    return !ok;
}
