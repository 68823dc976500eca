/* web.c - the library as a page uses it: a model in a worker that trains on a text in
   memory, shows what it looks at, and is saved in the form of the trainers' checkpoints.
   Compiled to WebAssembly by `make web`; page.html calls it. docs/web.md has a page of 20
   lines that does the same.

   There is one model at a time. Functions that return int return 1, or 0 after an error,
   whose text web_error returns. Arrays that they return are valid until the next call;
   web_shape(i) returns their dimensions.

   A model is created from the metadata of a trainer's checkpoint ("model.<field>"), with
   or without its tensors, so that the sizes in the page are options of the trainers. */
#define SEQTX_IMPLEMENTATION
#include "../../seqtx_attn_span.h"
#include "../../seqtx_compressive.h"
#include "../../seqtx_par.h"
#include "../../seqtx_sru.h"
#include "../../seqtx_text.h"

#ifdef __wasm__
  #define EXPORT(name) __attribute__((used)) name
#else
  #define EXPORT(name) name
#endif

enum { MOST = 12, BYTES = 768 << 20 };      /* MOST: probabilities per position; BYTES: the
                                               limit on the memory of a model */

/* What the page reads from the options of a checkpoint, in this order. */
typedef struct options {
    double threads, seed, streams, tokens;  /* streams: B; tokens: T, per stream and step */
    double lr, warmup, momentum, decay, clip;
    double tau_from, tau_to, tau_total;     /* PAR: the temperature */
    double gates_from, gates_lr;            /* PAR: first step and rate of the gates */
    double one_group;                       /* 0: a checkpoint of several groups of streams,
                                               which are not read here */
} options;

typedef struct web {
    options       o;
    stx_ctx      *x;
    stx_lm        lm;
    stx_vocab    *vocab;
    stx_corpus   *corpus[2];                /* training text, held-out text */
    int32_t      *tokens[2];
    stx_batches  *batches[2];
    stx_optim    *optim, *gates;            /* gates: PAR's, in a search */
    void         *state[2], *gen;
    uint64_t      step, print;              /* print: fingerprint of the training text */
    stx_schedule  schedule;
    double        tau;
    int32_t      *in, *out;
} web;

static web run;
static char *text;                          /* the whole text */
static size_t text_size;
static char error[1024];
static size_t shape[8];
static void *result[3];                     /* blocks that the functions have returned */


// >>access

const char *EXPORT(web_error)(void) {
    if (run.x && !stx_ok(run.x)) snprintf(error, sizeof error, "%s", stx_error(run.x));
    if (run.x) stx_clear_error(run.x);
    return error;
}

size_t EXPORT(web_shape)(int i) {
    return shape[i];
}

void *EXPORT(web_alloc)(size_t n) {
    return malloc(n ? n : 1);
}

void EXPORT(web_free)(void *p) {
    free(p);
}

const char *EXPORT(web_version)(void) {
    return stx_version();
}

const char *EXPORT(web_backend)(void) {
    return stx_backend(run.x);
}

static int fail(const char *why) {
    snprintf(error, sizeof error, "%s", why);
    return 0;
}

/* Replaces block i of the results. Returns NULL after an error. */
static void *block(int i, size_t n, size_t size) {
    free(result[i]);
    result[i] = calloc(n ? n : 1, size);
    if (!result[i]) fail("out of memory");
    return result[i];
}

static int ok(void) {
    return run.x && stx_ok(run.x);
}

static const stx_family *family(void) {
    return run.lm.family;
}

static int is(const char *name) {
    return family() && !strcmp(family()->name, name);
}

static const stx_family *family_of(const stx_file *f) {
    const stx_family *all[4];
    const char *name = stx_file_meta(f, "model.family");
    int i;
    all[0] = stx_span_family();
    all[1] = stx_sru_family();
    all[2] = stx_comp_family();
    all[3] = stx_par_family();
    for (i = 0; i < 4; i++)
        if (name && !strcmp(name, all[i]->name)) return all[i];
    return NULL;
}


// >>creation

static void close_run(web *r) {
    int i;
    for (i = 0; i < 2; i++) {
        stx_batches_free(r->batches[i]);
        stx_corpus_close(r->corpus[i]);
        free(r->tokens[i]);
    }
    free(r->in);
    stx_vocab_free(r->vocab);
    if (r->x) stx_destroy(r->x);
    memset(r, 0, sizeof *r);
}

/* The text, of which a copy is kept. Models that are opened later read it. */
int EXPORT(web_text)(const char *bytes, size_t n) {
    char *copy = (char *)malloc(n ? n : 1);
    if (!copy) return fail("out of memory");
    memcpy(copy, bytes, n);
    free(text);
    text = copy;
    text_size = n;
    return 1;
}

/* As in the trainers (tr_lm_fingerprint), so that they recognise the text. */
static uint64_t fingerprint(const stx_corpus *c) {
    size_t n = stx_corpus_size(c), step = n / 256 > 256 ? n / 256 : 256, at, i;
    uint64_t h = 14695981039346656037u;
    int32_t piece[256];
    for (at = 0; at < n; at += step) {
        size_t m = n - at < 256 ? n - at : 256;
        if (!stx_corpus_read(c, at, m, piece)) return 0;
        for (i = 0; i < m; i++) h = (h ^ (uint32_t)piece[i]) * 1099511628211u;
    }
    return h;
}

/* Opens part 0 or 1 of the text: as in the trainers, the last twentieth is never read (it
   is their test text), and the twentieth before it is held out. */
static int open_text(web *r, int part) {
    const size_t twentieth = text_size / 20, held_out = text_size - 2 * twentieth;
    const char *from = part ? text + held_out : text;
    const size_t bytes = part ? twentieth : held_out;
    stx_batches_desc d;
    size_t n = stx_vocab_encode_part(r->vocab, from, bytes, NULL, 0);
    if (n == STX_NPOS || !stx_ok(r->x)) return 0;
    r->tokens[part] = (int32_t *)malloc((n + 1) * sizeof *r->tokens[part]);
    if (!r->tokens[part]) return fail("out of memory");
    stx_vocab_encode_part(r->vocab, from, bytes, r->tokens[part], n);
    r->corpus[part] = stx_corpus_wrap(r->x, r->tokens[part], n, bytes);
    memset(&d, 0, sizeof d);
    d.B = (size_t)r->o.streams;
    d.T = (size_t)r->o.tokens;
    d.seed = (uint64_t)r->o.seed;
    if (part && n < 2 * (d.T + 1)) return fail("the text is too short: its twentieth, which is "
                                               "held out, must be longer than two segments");
    while (part && d.B > 1 && n < d.B * (d.T + 1)) d.B /= 2;
    r->batches[part] = stx_batches_create(r->x, r->corpus[part], &d);
    r->state[part] = r->lm.state_create(r->lm.model, d.B, 0);
    return stx_ok(r->x);
}

/* The optimiser of a name in a trainer's options. */
static int kind_of(const char *name) {
    static const struct {
        const char *name;
        int kind;
    } kinds[] = {{"adam", STX_ADAM}, {"adamw", STX_ADAMW}, {"sgd", STX_SGD}, {"muon", STX_MUON},
                 {"adagrad", STX_ADAGRAD}, {"radam", STX_RADAM}, {"lamb", STX_LAMB}};
    size_t i;
    for (i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (!strcmp(name, kinds[i].name)) return kinds[i].kind;
    return 0;
}

static stx_par *par(void) {
    return is("par") ? (stx_par *)run.lm.model : NULL;
}

static double tau_at(uint64_t step) {
    stx_par_anneal a;
    a.form = STX_PAR_TAU_TARGET;
    a.from = run.o.tau_from;
    a.to = run.o.tau_to;
    a.total = (uint64_t)run.o.tau_total;
    return stx_par_tau(&a, step);
}

static void cool(void) {
    if (!run.gates) return;
    run.tau = tau_at(run.step);
    stx_par_set_tau(par(), run.tau);
}

/* Creates everything that training needs around run.lm. */
static int prepare(const char *optim) {
    const size_t n = (size_t)(run.o.streams * run.o.tokens);
    stx_optim_desc d;
    memset(&d, 0, sizeof d);
    d.kind = kind_of(optim);
    d.momentum = run.o.momentum;
    d.weight_decay = run.o.decay;
    d.clip = run.o.clip;
    run.optim = stx_optim_create(run.lm.params, &d);
    memset(&d, 0, sizeof d);
    if (par() && par()->gates) run.gates = stx_optim_create(par()->gates, &d);
    run.schedule.lr = run.o.lr;
    run.schedule.warmup = (uint64_t)run.o.warmup;
    run.in = (int32_t *)malloc(2 * n * sizeof *run.in);
    if (!run.in) return fail("out of memory");
    run.out = run.in + n;
    if (!open_text(&run, 0) || !open_text(&run, 1)) return 0;
    run.gen = run.lm.gen_create(run.lm.model, 1, 0);
    run.print = fingerprint(run.corpus[0]);
    cool();
    return ok();
}

/* Restores the state of training from a trainer's checkpoint: as in tr_lm_load. Returns 2
   if the text is another one, at whose beginning the run continues. */
static int resume(const stx_file *f) {
    stx_batches_state pos;
    uint64_t tick, print, fresh;
    const char *tau = stx_file_meta(f, "tau"), *prefix = is("sru") ? "state.0." : "memory.0.";
    if (!stx_file_meta_u64(run.x, f, "step", &run.step)
        || !stx_file_meta_u64(run.x, f, "tick", &tick)
        || !stx_file_meta_u64(run.x, f, "data.print", &print)
        || !stx_file_meta_u64(run.x, f, "data.position", &pos.p)
        || !stx_file_meta_u64(run.x, f, "data.wraps", &pos.wraps)
        || !stx_file_meta_u64(run.x, f, "data.fresh", &fresh)
        || !stx_optim_load(run.optim, f))
        return 0;
    if (run.gates && !stx_optim_load_as(run.gates, f, "arch.")) return 0;
    stx_set_step_index(run.x, tick);
    cool();
    if (run.gates && tau) stx_par_set_tau(par(), run.tau = atof(tau));
    if (print != run.print || !(run.o.one_group > 0)) return 2;
    pos.fresh = fresh != 0;
    return stx_batches_set(run.batches[0], pos)
           && run.lm.state_load(run.state[0], f, prefix);
}

static int create_context(const options *o) {
    stx_desc d;
    memset(&d, 0, sizeof d);
    d.threads = (int)o->threads;
    d.seed = (uint64_t)o->seed;
    d.max_bytes = BYTES;
    run.o = *o;
    run.x = stx_create(&d);
    return run.x ? ok() : fail("out of memory");
}

/* Begin a new run, and end the old one. If the new one failed, the old one remains. */
static void begin_run(web *old) {
    *old = run;
    memset(&run, 0, sizeof run);
}

static int end_run(web *old, int status) {
    if (!status) {
        web_error();    /* copies the error of the context */
        close_run(&run);
        run = *old;
    } else {
        close_run(old);
    }
    return status;
}

/* Opens n bytes of a checkpoint, or of its metadata alone, from which a new model is
   created. `optim` is a name in the trainers' options. Returns 1, 2 if the checkpoint was
   trained on another text, 3 if it has a model but no state of training, or 0. */
static int open_file(const char *bytes, size_t n, const char *optim, const options *o) {
    const stx_family *fam;
    stx_file *f;
    void *desc;
    int tensors, training, status = 1;
    if (!create_context(o)) return 0;
    f = stx_file_in_memory(run.x, "the file", bytes, n);
    if (!f) return 0;
    fam = family_of(f);
    tensors = stx_file_count(f) > 0;
    training = stx_file_meta(f, "optim.kind") != NULL;
    if (!fam) {
        stx_file_close(f);
        return fail("the file: expected a model of one of the four families");
    }
    if (tensors) {
        run.lm = fam->as_lm(stx_model_read(run.x, fam, f));
    } else if ((desc = calloc(1, fam->desc_size)) != NULL) {
        if (stx_desc_read(run.x, fam, f, desc)) run.lm = fam->as_lm(fam->create(run.x, desc));
        free(desc);
    }
    run.vocab = stx_file_find(f, "vocab") ? stx_vocab_read(run.x, f)
                                          : stx_vocab_build(run.x, NULL, NULL, 0, 0);
    if (!run.lm.model || !run.vocab || !prepare(optim)) status = 0;
    else if (tensors) status = training ? resume(f) : 3;
    stx_file_close(f);
    return status;
}

int EXPORT(web_open)(const char *bytes, size_t n, const char *optim, const options *o) {
    web old;
    begin_run(&old);
    return end_run(&old, open_file(bytes, n, optim, o));
}

/* Replaces a PAR search by the network that it found so far, with its weights. */
int EXPORT(web_derive)(const char *optim) {
    web search;
    stx_par_desc d;
    char pattern[256];
    stx_par *found;
    int derived;
    if (!run.gates || !stx_par_argmax(par(), pattern, sizeof pattern))
        return fail("there is no search to take a network from");
    begin_run(&search);
    derived = create_context(&search.o);
    d = ((const stx_par *)search.lm.model)->desc;
    d.pattern = pattern;
    d.latency = STX_PAR_LATENCY_NONE;
    d.latency_weight = d.latency_target = 0;
    found = derived ? stx_par_create(run.x, &d) : NULL;
    derived = found && stx_par_inherit(found, (const stx_par *)search.lm.model);
    run.lm = stx_par_as_lm(found);
    run.vocab = stx_vocab_build(run.x, NULL, NULL, 0, 0);
    return end_run(&search, derived && run.vocab && prepare(optim));
}


// >>training

/* One step of training, in the order of the trainers' steps. Returns the loss in nats per
   token, or NaN after an error. */
double EXPORT(web_step)(void) {
    stx_ctx *x = run.x;
    const size_t B = (size_t)run.o.streams, T = (size_t)run.o.tokens;
    const int learn = run.gates && run.step >= (uint64_t)run.o.gates_from;
    stx_tensor *nll;
    double loss;
    int fresh = ok() ? stx_batches_next(run.batches[0], run.in, run.out) : STX_BATCH_END;
    if (fresh == STX_BATCH_END) return (double)NAN;
    if (fresh == STX_BATCH_FRESH) run.lm.state_reset(run.state[0]);
    if (run.gates) stx_par_freeze(par(), !learn);
    stx_begin(x, STX_TRAIN);
    nll = run.lm.loss(run.lm.model, stx_tokens(x, run.in, B, T), stx_tokens(x, run.out, B, T),
                      run.state[0], run.state[0]);
    stx_backward(x, run.lm.total(run.lm.model, nll));
    loss = stx_item(x, nll);
    if (!stx_optim_step(run.optim, stx_schedule_lr(&run.schedule, run.step + 1)) && ok())
        run.lm.state_reset(run.state[0]);       /* the loss or a gradient was not finite */
    run.lm.updated(run.lm.model);
    if (learn) stx_optim_step(run.gates, run.o.gates_lr);
    run.step++;
    cool();
    return ok() ? loss : (double)NAN;
}

double EXPORT(web_steps)(void) {
    return (double)run.step;
}

double EXPORT(web_parameters)(void) {
    return (double)stx_params_size(run.lm.params);
}

double EXPORT(web_bytes)(void) {
    return (double)stx_bytes(run.x);
}

/* Bits per byte of the held-out text, at most `most` segments of each of its streams. */
double EXPORT(web_held_out)(int most) {
    const stx_corpus *c = run.corpus[1];
    stx_ctx *x = run.x;
    const size_t B = stx_batches_rows(run.batches[1]);
    double sum = 0, count = 0;
    size_t T = 0;
    stx_batches_rewind(run.batches[1], STX_EVAL_ALL);
    run.lm.state_reset(run.state[1]);
    while (most-- > 0 && stx_batches_next_eval(run.batches[1], run.in, run.out, &T)
                             != STX_BATCH_END) {
        stx_begin(x, STX_EVAL);
        sum += (double)(B * T)
               * stx_item(x, run.lm.loss(run.lm.model, stx_tokens(x, run.in, B, T),
                                         stx_tokens(x, run.out, B, T), run.state[1],
                                         run.state[1]));
        count += (double)(B * T);
    }
    if (!ok() || !(count > 0)) return (double)NAN;
    return sum / count / log(2.0) * (double)stx_corpus_size(c) / (double)stx_corpus_bytes(c);
}

/* Changes the learning rate of the following steps. */
void EXPORT(web_set_lr)(double lr) {
    run.o.lr = run.schedule.lr = lr;
}


// >>text

/* Encodes n bytes. Returns the ids, in block 2, or NULL after an error. */
static int32_t *encode(const char *from, size_t n, size_t *count) {
    int32_t *ids;
    *count = ok() ? stx_vocab_encode(run.vocab, from, n, NULL, 0) : STX_NPOS;
    if (*count == STX_NPOS || !(ids = (int32_t *)block(2, *count + 1, sizeof *ids))) return NULL;
    stx_vocab_encode(run.vocab, from, n, ids, *count);
    return ids;
}

/* Stores the most likely tokens after a position, with their probabilities. */
static void most_likely(const stx_real *log_p, float *id, float *p) {
    const size_t V = stx_vocab_size(run.vocab);
    double largest = (double)log_p[0], sum = 0;
    size_t i, k;
    for (i = 1; i < V; i++)
        if ((double)log_p[i] > largest) largest = (double)log_p[i];
    for (i = 0; i < V; i++) sum += exp((double)log_p[i] - largest);
    for (k = 0; k < MOST; k++) id[k] = -1;
    for (i = 0; i < V; i++) {
        const float q = (float)(exp((double)log_p[i] - largest) / sum);
        for (k = MOST; k > 0 && (id[k - 1] < 0 || q > p[k - 1]); k--) {
            if (k == MOST) continue;
            id[k] = id[k - 1];
            p[k] = p[k - 1];
        }
        if (k == MOST) continue;
        id[k] = (float)i;
        p[k] = q;
    }
}

/* Continues n bytes of text by `count` tokens. Returns (n',2 MOST + 1) floats, one row
   per token of the text and of its continuation: its id, and the ids and probabilities
   of what the model expects in its place. */
float *EXPORT(web_sample)(const char *from, size_t n, int count, double temperature,
                          double top_p, double seed) {
    size_t prompt, i, total;
    int32_t *ids = encode(from, n, &prompt), token;
    const size_t row = 2 * MOST + 1, V = stx_vocab_size(run.vocab);
    const stx_real *log_p = NULL;
    stx_real *work = (stx_real *)block(1, V, sizeof *work);
    float *out;
    stx_sampling how;
    if (!ids || !work || !prompt) return NULL;
    memset(&how, 0, sizeof how);
    how.temperature = temperature;
    how.top_p = top_p;
    how.seed = (uint64_t)seed;
    total = prompt + (size_t)count;
    out = (float *)block(0, total * row, sizeof *out);
    if (!out) return NULL;
    run.lm.gen_reset(run.gen);
    for (i = 0; i < total; i++) {
        float *at = out + i * row;
        if (log_p) most_likely(log_p, at + 1, at + 1 + MOST);
        token = i < prompt ? ids[i] : stx_sample(&how, i, log_p, V, work);
        at[0] = (float)token;
        log_p = run.lm.gen_feed(run.gen, &token, 1);
        if (!log_p) return NULL;
    }
    shape[0] = total;
    shape[1] = row;
    return out;
}

/* The bytes of a token; web_shape(0) is their number. */
const char *EXPORT(web_piece)(int id) {
    return stx_vocab_piece(run.vocab, id, &shape[0]);
}

/* Reads the end of n bytes in whole segments, with memory, and returns the attention
   weights of layer l in the last segment, (H,T,K); web_shape(3 + k) is the number of keys
   of kind k (STX_KEY_ZERO ..). NULL: the layer has no attention, or an error. web_keys
   returns where the keys come from. */
float *EXPORT(web_attention)(const char *from, size_t n, int l) {
    const size_t T = (size_t)run.o.tokens;
    size_t count, at, i;
    int32_t *ids = encode(from, n, &count), *keys;
    const stx_attention_map *map;
    void *state;
    float *out;
    if (!ids) return NULL;
    if (count <= T) {
        fail("the text must be longer than a segment");
        return NULL;
    }
    state = run.lm.state_create(run.lm.model, 1, 0);
    for (at = (count - 1) % T; at + T < count; at += T) {
        stx_begin(run.x, STX_EVAL);
        run.lm.loss(run.lm.model, stx_tokens(run.x, ids + at, 1, T),
                    stx_tokens(run.x, ids + at + 1, 1, T), state, state);
    }
    error[0] = 0;
    map = ok() ? run.lm.attention_map(run.lm.model, (size_t)l, 0) : NULL;
    out = map ? (float *)block(0, map->heads * T * map->keys, sizeof *out) : NULL;
    keys = out ? (int32_t *)block(1, 3 * map->keys, sizeof *keys) : NULL;
    if (keys) {
        for (i = 0; i < map->heads * T * map->keys; i++) out[i] = (float)map->weight[i];
        for (i = 0; i < map->keys; i++) {
            keys[3 * i] = map->key[i].kind;
            keys[3 * i + 1] = (int32_t)map->key[i].first;
            keys[3 * i + 2] = map->key[i].missing ? 0 : (int32_t)map->key[i].tokens;
        }
        shape[0] = map->heads;
        shape[1] = map->queries;
        shape[2] = map->keys;
        for (i = 0; i < STX_KEY_KINDS; i++) shape[3 + i] = map->count[i];
    }
    run.lm.state_free(state);
    return keys ? out : NULL;
}

/* (K,3) of the last web_attention: the kind of each key, its first token (0 is the first
   of the segment, -1 the one before) and the number of its tokens. */
const int32_t *EXPORT(web_keys)(void) {
    return (const int32_t *)result[1];
}


// >>families

/* The Sequential Transformer's spans in tokens, without the ramp, (layers,heads),
   followed by the window of each layer. */
double *EXPORT(web_spans)(void) {
    const stx_span *m = (const stx_span *)run.lm.model;
    double *out;
    size_t l;
    if (!is("attn_span")) return NULL;
    shape[0] = m->desc.layers;
    shape[1] = m->desc.heads;
    shape[2] = m->desc.span;
    out = (double *)block(0, shape[0] * (shape[1] + 1), sizeof *out);
    if (!out) return NULL;
    stx_span_head_spans(m, out);
    for (l = 0; l < shape[0]; l++) out[shape[0] * shape[1] + l] = (double)stx_span_window(m, l);
    return out;
}

/* The span penalty and the ramp, from the next step on. */
void EXPORT(web_set_span)(double span_loss, double ramp) {
    stx_span *m = (stx_span *)run.lm.model;
    if (!is("attn_span")) return;
    m->desc.span_loss = span_loss;
    m->desc.ramp = ramp;
}

/* SRU's gates and states of layer l over n bytes, (T,3,O): the forget gate f, the reset
   gate r and the state c. The formulas are those of the manual of seqtx_sru.h; the
   library returns the input of the layer. */
float *EXPORT(web_gates)(const char *from, size_t n, int layer) {
    const stx_sru_lm *m = (const stx_sru_lm *)run.lm.model;
    const stx_sru_layer *p;
    stx_ctx *x = run.x;
    size_t T, O, t, o, l = (size_t)layer;
    int32_t *ids = encode(from, n, &T);
    stx_tensor **inputs, *u;
    stx_real *U, *v;
    float *out;
    stx_sru_io io;
    if (!is("sru") || !ids || !T || l >= m->sru->desc.layers) return NULL;
    p = &m->sru->layer[l];
    if (p->attends || m->sru->desc.norm || !p->v) {
        fail("gates are shown for layers without attention and norm");
        return NULL;
    }
    O = m->sru->O;
    stx_begin(x, STX_EVAL);
    memset(&io, 0, sizeof io);
    inputs = (stx_tensor **)stx_block(x, m->sru->desc.layers * sizeof *inputs);
    io.inputs = inputs;
    stx_sru_forward(m->sru, stx_vocab_io_embed(m->vocab_io, stx_tokens(x, ids, 1, T)), &io);
    u = inputs ? inputs[l] : NULL;
    if (p->w1) u = stx_linear(x, u, p->w1, NULL, STX_ACT_NONE);
    u = stx_linear(x, u, p->w3, NULL, STX_ACT_NONE);
    stx_block_free(x, inputs);
    U = (stx_real *)block(1, T * p->k * O + 4 * O, sizeof *U);
    out = (float *)block(0, T * 3 * O, sizeof *out);
    if (!ok() || !U || !out) return NULL;
    v = U + T * p->k * O;
    stx_get(x, u, U);
    stx_get(x, p->v, v);
    stx_get(x, p->bias, v + 2 * O);
    for (o = 0; o < O; o++) {
        double c = 0;
        for (t = 0; t < T; t++) {
            const stx_real *at = U + t * p->k * O + o;
            const double f = 1 / (1 + exp(-((double)at[O] + (double)v[o] * c
                                            + (double)v[2 * O + o])));
            const double r = 1 / (1 + exp(-((double)at[2 * O] + (double)v[O + o] * c
                                            + (double)v[3 * O + o])));
            c = (double)at[0] + (c - (double)at[0]) * f;
            out[(t * 3 + 0) * O + o] = (float)f;
            out[(t * 3 + 1) * O + o] = (float)r;
            out[(t * 3 + 2) * O + o] = (float)c;
        }
    }
    shape[0] = T;
    shape[1] = O;
    return out;
}

/* The Compressive Transformer's memories, (layers,5): rows in the memory and its
   capacity, the same for the compressed memory, and rel_error of a step whose losses are
   measured without an update. */
double *EXPORT(web_memories)(void) {
    const stx_comp *m = (const stx_comp *)run.lm.model;
    const stx_comp_state *s = (const stx_comp_state *)run.state[0];
    double *out;
    size_t l;
    if (!is("compressive")) return NULL;
    shape[0] = m->desc.layers;
    shape[1] = m->desc.ratio;
    out = (double *)block(0, 5 * shape[0], sizeof *out);
    for (l = 0; out && l < shape[0]; l++) {
        double *at = out + 5 * l;
        at[0] = (double)s->mem->layer[l].count;
        at[1] = (double)m->layer[l].M;
        at[2] = (double)s->comp->layer[l].count;
        at[3] = (double)m->layer[l].C;
        at[4] = m->rel_error[l] ? stx_item(run.x, m->rel_error[l]) : (double)NAN;
    }
    return out;
}

/* PAR's probabilities of attention, feed-forward and identity, (blocks,3). NULL if the
   model is a fixed network. */
double *EXPORT(web_probabilities)(void) {
    double *out;
    if (!run.gates) return NULL;
    shape[0] = par()->desc.blocks;
    shape[1] = 3;
    out = (double *)block(0, 3 * shape[0], sizeof *out);
    return out && stx_par_probs(par(), out) ? out : NULL;
}

double EXPORT(web_tau)(void) {
    return run.gates ? run.tau : (double)NAN;
}

/* The temperature that is planned for a step of a search. */
double EXPORT(web_planned_tau)(double step) {
    return run.gates ? tau_at((uint64_t)step) : (double)NAN;
}

/* The blocks of a PAR network, or those that a search has found so far. */
const char *EXPORT(web_pattern)(void) {
    static char pattern[256];
    pattern[0] = 0;
    if (run.gates) stx_par_argmax(par(), pattern, sizeof pattern);
    else if (par()) snprintf(pattern, sizeof pattern, "%s", par()->desc.pattern);
    return pattern;
}


// >>checkpoint

/* Returns a checkpoint that the family's trainer resumes, with web_shape(0) bytes, or
   NULL after an error. `config` contains the trainer's options, as JSON. */
void *EXPORT(web_save)(const char *config) {
    stx_ctx *x = run.x;
    stx_writer *w = stx_writer_create(x);
    const stx_batches_state pos = stx_batches_get(run.batches[0]);
    char format[64], tau[32];
    size_t n = 0;
    void *bytes, *out = NULL;
    snprintf(format, sizeof format, "seqtx.%s.1", family()->name);
    snprintf(tau, sizeof tau, "%.17g", run.gates ? run.tau : 1.0);
    stx_writer_meta(w, "format", format);
    stx_writer_meta(w, "config", config);
    stx_writer_meta_u64(w, "step", run.step);
    stx_writer_meta_u64(w, "tick", stx_step_index(x));
    stx_writer_meta_u64(w, "seed", (uint64_t)run.o.seed);
    stx_writer_meta_u64(w, "data.tokens", stx_corpus_size(run.corpus[0]));
    stx_writer_meta_u64(w, "data.print", run.print);
    stx_writer_meta_u64(w, "data.position", pos.p);
    stx_writer_meta_u64(w, "data.wraps", pos.wraps);
    stx_writer_meta_u64(w, "data.fresh", (uint64_t)pos.fresh);
    stx_model_write(w, family(), run.lm.model);
    stx_optim_save(w, run.optim);
    if (par()) stx_writer_meta(w, "tau", tau);
    if (run.gates) stx_optim_save_as(w, run.gates, "arch.");
    run.lm.state_save(w, run.state[0], is("sru") ? "state.0." : "memory.0.");
    stx_vocab_write(w, run.vocab);
    stx_writer_checksum(w);
    bytes = stx_writer_bytes(w, &n);    /* writes nothing after an error */
    if (bytes && (out = block(0, n, 1)) != NULL) memcpy(out, bytes, n);
    stx_block_free(x, bytes);
    shape[0] = n;
    return out;
}
