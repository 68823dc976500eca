/* attention_map.c - draws where the heads of a model look while it reads a text. The
   model is one that a trainer saved, or a small one of any family that the program itself
   trains on the text for a few seconds.

       cc -O2 attention_map.c -lm -pthread -o attention_map
       ./attention_map -c run.safetensors -o map.svg text.txt
       ./attention_map -o map.svg ../docs/design.md
       ./attention_map -m compressive -w weights.tsv -o map.svg ../docs/design.md

   The options, before the file with the text, which a checkpoint does not need with -t:
   -c FILE                         the checkpoint of a model; without it:
   -m span|compressive|par|sru     the family of the model to train (default: span)
   -l 1                            the layer, counted from 1 (default: the last one that
                                   has attention)
   -t TEXT                         the text to read (default: the beginning of the file)
   -s 600                          the number of training steps
   -w FILE                         also writes all weights, as tab-separated values
   -o FILE                         the picture, an SVG; -: standard output

   With -c, the file may be -, standard input. The text is read in segments, with memory;
   the picture shows the last segment. Each row is a query, each column a key. Of words
   and other longer tokens, the first LABEL characters are shown; the titles of the cells
   have all of them. */
#include "svg.h"
#define SEQTX_IMPLEMENTATION
#include "../seqtx_attn_span.h"
#include "../seqtx_compressive.h"
#include "../seqtx_par.h"
#include "../seqtx_sru.h"
#include "../seqtx_text.h"

enum { B = 8, T = 24, CELL = 12, LABEL = 12 }; /* B: streams in training; T: tokens per segment;
                                                  CELL: in pixels */

#define LETTER 6.4     /* width of a character at the axes, in pixels */

#define SMALLEST 0.002 /* smaller weights are not drawn */

typedef struct settings {
    const char *checkpoint, *family, *text, *weights, *picture, *file;
    int layer, steps;
} settings;

/* A model and the text that it reads. */
typedef struct reading {
    stx_lm     lm;
    stx_vocab *vocab;
    size_t     segment;     /* the number of tokens of a segment */
    int32_t   *ids;         /* [n + 1]: the tokens, and one more as the last target */
    size_t     n, now;      /* now: the first token of the last segment */
} reading;


// >>model

static stx_lm model_of(stx_ctx *x, const char *family) {
    stx_lm none = {0};
    if (!strcmp(family, "span")) {
        stx_span_desc d = {0};
        d.vocab = 256;
        d.layers = 2;
        d.dim = 64;
        d.span = 64;
        d.ramp = 8;
        d.adapt_span = 1;
        d.span_init = 0.5;
        d.span_loss = 1e-4;
        return stx_span_as_lm(stx_span_create(x, &d));
    }
    if (!strcmp(family, "compressive")) {
        stx_comp_desc d = {0};
        d.vocab = 256;
        d.layers = 2;
        d.dim = 64;
        d.heads = 4;
        d.segment = d.mem = T;
        d.cmem = 12;
        d.ratio = 4;
        return stx_comp_as_lm(stx_comp_create(x, &d));
    }
    if (!strcmp(family, "par")) {
        stx_par_desc d = {0};
        d.vocab = 256;
        d.dim = 64;
        d.heads = 4;
        d.head_dim = 16;
        d.inner = 256;
        d.pattern = "sfsf";
        d.segment = d.mem = T;
        return stx_par_as_lm(stx_par_create(x, &d));
    }
    if (!strcmp(family, "sru")) {
        stx_sru_lm_desc d = {0};
        d.vocab = 256;
        d.dim = 128;
        d.sru.layers = 2;
        d.sru.proj = 64;
        d.sru.heads = 4;
        d.sru.transform = STX_SRU_ATTENTION;
        return stx_sru_as_lm(stx_sru_lm_create(x, &d));
    }
    stx_fail(x, STX_ERR_ARG, "-m %s: expected span, compressive, par or sru", family);
    return none;
}

/* Opens a checkpoint of any family. A Compressive Transformer has its own length of
   segments, because only full ones enter its memory. */
static void open_model(stx_ctx *x, const char *path, reading *r) {
    const stx_family *const family[] = {stx_span_family(), stx_comp_family(), stx_par_family(),
                                        stx_sru_family()};
    struct stat st;
    if (!stat(path, &st) && S_ISDIR(st.st_mode)) {
        stx_fail(x, STX_ERR_IO, "-c %s: expected a checkpoint, got a directory; a trainer with "
                 "--out %s saves %s/model.safetensors", path, path, path);
        return;
    }
    stx_file *f = stx_file_open(x, path);
    const char *name = f ? stx_file_meta(f, "model.family") : NULL;
    r->lm = stx_lm_open(x, path, family, 4);
    r->vocab = stx_vocab_open(x, path);
    if (r->lm.model && name && !strcmp(name, stx_comp_family()->name))
        r->segment = ((stx_comp *)r->lm.model)->desc.segment;
    stx_file_close(f);
}

static void train(const stx_lm *lm, const stx_vocab *vocab, const char *path, int steps) {
    static int32_t in[B * T], next[B * T];
    stx_ctx *x = lm->ctx;
    stx_corpus *text = stx_corpus_open(x, vocab, path, 0, 0);
    stx_batches_desc bd = {0};
    bd.B = B;
    bd.T = T;
    stx_batches *batches = stx_batches_create(x, text, &bd);
    stx_optim *optim = stx_optim_create(lm->params, NULL);
    void *memory = lm->state_create(lm->model, B, 0);
    for (int step = 1; step <= steps && stx_ok(x); step++) {
        if (stx_batches_next(batches, in, next) == STX_BATCH_FRESH) lm->state_reset(memory);
        stx_begin(x, STX_TRAIN);
        stx_tensor *nll = lm->loss(lm->model, stx_tokens(x, in, B, T), stx_tokens(x, next, B, T),
                                   memory, memory);
        stx_backward(x, lm->total(lm->model, nll));
        if (step % 100 == 0)
            fprintf(stderr, "step %d: %.3f bits per byte\n", step, stx_item(x, nll) / 0.6931);
        if (stx_optim_step(optim, 0.003)) lm->updated(lm->model);
    }
    stx_batches_free(batches);
    stx_corpus_close(text);
}

/* Returns the length of a text without a character or word that was cut at its end. */
static size_t whole(const char *text, size_t bytes, int kind) {
    size_t last = bytes;
    uint32_t c;
    if (kind == STX_TOK_WORDS) {
        while (last && !strchr(" \t\n", text[last - 1])) last--;
        if (last) return last;
        last = bytes;       /* no blank: a part of a word */
    }
    while (last && (text[last - 1] & 0xC0) == 0x80) last--;
    if (last && !stx_utf8((const unsigned char *)text + last - 1, bytes - last + 1, &c)) last--;
    else last = bytes;
    return last;
}

/* Sets the tokens to those of `text` or, if it is NULL, of the beginning of the file: as
   many as fill three segments and T tokens more. */
static void encode(reading *r, const char *text, const char *path) {
    stx_ctx *x = r->lm.ctx;
    const size_t most = 3 * r->segment + T;
    const int from_file = !text, standard = from_file && !strcmp(path, "-");
    size_t bytes = text ? strlen(text) : 8 * most, count;
    if (from_file) {
        char *first = (char *)stx_persist(x, bytes);
        FILE *f = standard ? stdin : fopen(path, "rb");
        if (!f) stx_fail(x, STX_ERR_IO, "%s: cannot read: %s", path, strerror(errno));
        const size_t asked = bytes;
        bytes = f && first ? fread(first, 1, bytes, f) : 0;
        if (f && ferror(f)) stx_fail(x, STX_ERR_IO, "%s: cannot read: %s", path, strerror(errno));
        if (bytes == asked) bytes = whole(first, bytes, stx_vocab_kind(r->vocab));
        if (f && !standard) fclose(f);
        text = first;
    }
    count = stx_ok(x) ? stx_vocab_encode(r->vocab, text, bytes, NULL, 0) : 0;
    if (!count) stx_fail(x, STX_ERR_ARG, "%s: there is no text", from_file ? path : "-t");
    r->ids = (int32_t *)stx_persist(x, stx_bytes_of(count + 1, sizeof *r->ids, 1));
    if (!stx_ok(x)) return;
    stx_vocab_encode(r->vocab, text, bytes, r->ids, count);
    r->n = from_file && count > most ? most : count;
}

/* Reads the text in segments. The maps of this step then describe the last one. */
static void read_text(reading *r) {
    stx_ctx *x = r->lm.ctx;
    void *memory = r->lm.state_create(r->lm.model, 1, 0);
    for (r->now = 0; stx_ok(x); r->now += r->segment) {
        const size_t left = r->n - r->now, count = left < r->segment ? left : r->segment;
        const int32_t *ids = r->ids + r->now;
        stx_begin(x, STX_EVAL);
        r->lm.loss(r->lm.model, stx_tokens(x, ids, 1, count), stx_tokens(x, ids + 1, 1, count),
                   memory, memory);
        if (left <= r->segment) return;
    }
}


// >>picture

/* What is drawn: keys first .. map->keys - 1 of a map. Lengths are in pixels. */
typedef struct panel {
    const stx_attention_map *map;
    const reading *text;
    size_t first;
    size_t label;       /* characters of the longest token that is shown, at most LABEL */
    double x, y, width, height;
} panel;

static const char *const style =
    "<style>.ink{fill:#08306b}.seen{fill:#eef1f5}.axis{font-family:'DejaVu Sans Mono',Menlo,"
    "Consolas,monospace;font-size:10.5px;text-anchor:middle;fill:#555}.word{text-anchor:start}"
    ".row{text-anchor:end}.edge{stroke:#555;fill:none}"
    ".span{stroke:#d55e00;stroke-width:1.5;fill:none}.faint{fill:#777}"
    "@media (prefers-color-scheme:dark){svg{fill:#ddd}svg>rect{fill:#14171c}.ink{fill:#9fd3ff}"
    ".seen{fill:#242932}.axis,.faint{fill:#aaa}.edge{stroke:#aaa}.span{stroke:#ff9d45}}</style>\n";

/* Opacity grows with the square root of the weight, so that small ones are visible. */
static double opacity(double weight) {
    return sqrt(weight > 1 ? 1 : weight);
}

/* Writes how a token is shown, which is `i` tokens after the first of the last segment:
   its first character or, with `whole`, all of it. If tokens are bytes, a longer
   character is shown at its first byte. */
static const char *shown(char out[32], const panel *p, ptrdiff_t i, int whole) {
    const reading *r = p->text;
    const ptrdiff_t at = (ptrdiff_t)r->now + i;
    unsigned char s[32] = {0};
    size_t bytes, n;
    if (at < 0 || (size_t)at >= r->n) return "";
    n = r->n - (size_t)at < 4 ? r->n - (size_t)at : 4;
    stx_vocab_decode(r->vocab, r->ids + at, n, (char *)s, sizeof s - 1);
    if (*s == ' ') return "\342\220\243";
    if (*s == '\n') return "\342\206\265";
    if (*s == '\t') return "\342\207\245";
    bytes = tr_utf8(s);
    if (!bytes || *s < 0x20 || *s == 0x7F) return "\302\267";
    if (whole) {
        n = stx_vocab_decode(r->vocab, r->ids + at, 1, NULL, 0);
        if (n > bytes) bytes = n < sizeof s - 1 ? n : sizeof s - 1;
        if (bytes > 1 && s[bytes - 1] == ' ') bytes--; /* the blank after a word */
    }
    memcpy(out, s, bytes);
    out[bytes] = 0;
    return out;
}

/* Writes a token as shown at the axes: up to p->label characters of it. *count, which may
   be NULL, receives the number of its characters. */
static const char *labelled(char out[32], const panel *p, ptrdiff_t i, size_t *count) {
    const char *text = shown(out, p, i, p->label > 1);
    size_t n = 0, at = 0, end = 0;
    for (; text[at]; n++) {
        const size_t bytes = tr_utf8((const unsigned char *)text + at);
        at += bytes ? bytes : 1;
        if (n + 1 == p->label) end = at;
    }
    if (count) *count = n;
    if (n > p->label && text == out) out[end] = 0;
    return text;
}

/* Sets p->label to what the tokens of all queries and keys need. */
static void measure_labels(panel *p) {
    const size_t keys = p->map->keys;
    size_t longest = 1, n, j;
    char out[32];
    p->label = LABEL;
    for (j = 0; j < p->map->queries + keys; j++) {
        const stx_attention_key *k = &p->map->key[j < keys ? j : 0];
        if (j < keys && (j < p->first || k->missing || !k->tokens)) continue;
        labelled(out, p, j < keys ? k->first : (ptrdiff_t)(j - keys), &n);
        if (n > longest) longest = n;
    }
    p->label = longest < LABEL ? longest : LABEL;
}

static double key_x(const panel *p, size_t j) {
    return p->x + CELL * ((double)j - (double)p->first);
}

/* The x coordinate of the token at a distance from the beginning of the segment. */
static double token_x(const panel *p, double position) {
    const size_t *count = p->map->count;
    const size_t before = count[STX_KEY_ZERO] + count[STX_KEY_COMPRESSED] + count[STX_KEY_MEMORY];
    return key_x(p, before) + CELL * position;
}

/* Appends the tokens along both axes. Characters of a compressed row are stacked. Words
   are written upwards; a compressed row has the first of its words. */
static void tokens(tr_buf *b, const panel *p) {
    const int words = p->label > 1;
    char out[32];
    svg_add(b, "<g class=\"axis\">\n");
    for (size_t j = p->first; words && j < p->map->keys; j++) {
        const stx_attention_key *k = &p->map->key[j];
        if (k->missing || !k->tokens) continue;
        svg_add(b, "<text class=\"word\" transform=\"translate(%n %n) rotate(-90)\">%t%s</text>\n",
                key_x(p, j) + 0.8 * CELL, p->y - 5, labelled(out, p, k->first, NULL),
                k->tokens > 1 ? ".." : "");
    }
    for (size_t i = 0; words && i < p->map->queries; i++)
        svg_text(b, p->x - 5, p->y + CELL * ((double)i + 0.8), " class=\"row\"",
                 labelled(out, p, (ptrdiff_t)i, NULL));
    if (words) {
        svg_add(b, "</g>\n");
        return;
    }
    for (size_t j = p->first; j < p->map->keys; j++) {
        const stx_attention_key *k = &p->map->key[j];
        for (size_t t = 0; t < k->tokens && !k->missing; t++)
            svg_text(b, key_x(p, j) + CELL / 2, p->y - 4 - CELL * (double)(k->tokens - 1 - t), "",
                     shown(out, p, k->first + (ptrdiff_t)t, 0));
    }
    for (size_t i = 0; i < p->map->queries; i++)
        svg_text(b, p->x - 8, p->y + CELL * ((double)i + 0.8), "",
                 shown(out, p, (ptrdiff_t)i, 0));
    svg_add(b, "</g>\n");
}

/* Appends the names of the kinds of keys and the lines between them. `above`: space that
   the tokens take above the panel. */
static void kinds(tr_buf *b, const panel *p, double above) {
    static const char *const name[STX_KEY_KINDS] = {"not written", "compressed", "memory",
                                                    "segment", "persistent"};
    size_t end = 0;
    for (int k = 0; k < STX_KEY_KINDS; k++) {
        size_t begin = end > p->first ? end : p->first;
        end += p->map->count[k];
        if (end <= begin) continue;
        double x0 = key_x(p, begin), x1 = key_x(p, end);
        svg_add(b, "<path class=\"edge\" d=\"M%n %nv-4H%nv4\"/>\n", x0 + 1, p->y - above, x1 - 1);
        if (x1 - x0 > 6.5 * (double)strlen(name[k]))
            svg_text(b, x0 + 1, p->y - above - 8, " class=\"faint\"", name[k]);
        if (begin > p->first)
            svg_add(b, "<path class=\"edge\" d=\"M%n %nV%n\"/>\n", x0, p->y, p->y + p->height);
    }
}

/* Appends the background of the keys that each query may see. */
static void seen(tr_buf *b, const panel *p) {
    const size_t persistent = p->map->keys - p->map->count[STX_KEY_PERSISTENT];
    svg_add(b, "<path class=\"seen\" d=\"");
    for (size_t i = 0; i < p->map->queries; i++) {
        double to = token_x(p, (double)(i + 1)), y = p->y + CELL * (double)i;
        svg_add(b, "M%n %nH%nv%nH%nz", p->x, y, to, (double)CELL, p->x);
        if (persistent < p->map->keys)
            svg_add(b, "M%n %nH%nv%nH%nz", key_x(p, persistent), y, p->x + p->width, (double)CELL,
                    key_x(p, persistent));
    }
    svg_add(b, "\"/>\n");
}

/* Appends the weights of a head. A viewer shows the title of the cell that the mouse
   points at. */
static void cells(tr_buf *b, const panel *p, size_t head) {
    char query[32], key[32], title[128];
    svg_add(b, "<g class=\"ink\">\n");
    for (size_t i = 0; i < p->map->queries; i++)
        for (size_t j = p->first; j < p->map->keys; j++) {
            const stx_attention_key *k = &p->map->key[j];
            double w = p->map->weight[(head * p->map->queries + i) * p->map->keys + j];
            if (w < SMALLEST) continue;
            snprintf(title, sizeof title, "%s to %s, distance %ld: %.4f",
                     shown(query, p, (ptrdiff_t)i, 1),
                     k->tokens ? shown(key, p, k->first, 1) : "key",
                     (long)((ptrdiff_t)i - k->first), w);
            svg_add(b, "<rect x=\"%n\" y=\"%n\" width=\"%n\" height=\"%n\" fill-opacity=\"%n\">"
                    "<title>%t</title></rect>\n", key_x(p, j), p->y + CELL * (double)i,
                    (double)CELL, (double)CELL, opacity(w), title);
        }
    svg_add(b, "</g>\n");
}

/* Appends a staircase at this distance before each query. */
static void staircase(tr_buf *b, const panel *p, double distance, const char *look) {
    int on = 0;
    svg_add(b, "<path class=\"span\"%s d=\"", look);
    for (size_t i = 0; i < p->map->queries; i++) {
        double x = token_x(p, (double)i - distance), y = p->y + CELL * (double)i;
        if (x < p->x) continue;
        svg_add(b, on ? "H%n" : "M%n", x);
        if (!on) svg_add(b, " %n", y);
        svg_add(b, "V%n", y + CELL);
        on = 1;
    }
    svg_add(b, "%s\"/>\n", on ? "" : "M0 0");
}

static void draw_head(tr_buf *b, const panel *p, size_t head, double above) {
    const stx_attention_map *map = p->map;
    char title[96];
    int n = snprintf(title, sizeof title, "head %u", (unsigned)head + 1);
    if (map->span)
        snprintf(title + n, sizeof title - (size_t)n, ": span %.1f tokens, ramp %.0f",
                 map->span[head], map->ramp);
    svg_text(b, p->x, p->y - above - 24, " font-size=\"12\" font-weight=\"bold\"", title);
    tokens(b, p);
    seen(b, p);
    cells(b, p, head);
    kinds(b, p, above);
    if (map->span) { /* the mask is 1 up to distance span + 1, and 0 from span + 1 + ramp */
        staircase(b, p, map->span[head] + 1, "");
        staircase(b, p, map->span[head] + 1 + map->ramp, " stroke-dasharray=\"3 3\"");
    }
}

/* Appends the scale of the weights, and the meaning of the lines. */
static void legend(tr_buf *b, double x, double y, int spans) {
    static const double tick[] = {0, 0.01, 0.1, 0.25, 0.5, 1};
    enum { WIDTH = 240, STEPS = 48 };
    char text[32];
    svg_text(b, x, y + 9, "", "weight");
    x += 48;
    svg_add(b, "<rect class=\"seen\" x=\"%n\" y=\"%n\" width=\"%n\" height=\"12\"/>"
            "<g class=\"ink\">\n", x, y, (double)WIDTH);
    for (int i = 0; i < STEPS; i++)
        svg_add(b, "<rect x=\"%n\" y=\"%n\" width=\"%n\" height=\"12\" fill-opacity=\"%n\"/>\n",
                x + i * (double)WIDTH / STEPS, y, (double)WIDTH / STEPS, (i + 0.5) / STEPS);
    svg_add(b, "</g>\n<g class=\"axis\">\n");
    for (size_t i = 0; i < sizeof tick / sizeof *tick; i++)
        svg_text(b, x + WIDTH * opacity(tick[i]), y + 23, "", svg_number(text, tick[i], 2));
    svg_add(b, "</g>\n");
    if (!spans) return;
    x += WIDTH + 30;
    svg_add(b, "<path class=\"span\" d=\"M%n %nh24\"/>\n", x, y + 6);
    svg_text(b, x + 30, y + 10, "", "learned span");
    svg_add(b, "<path class=\"span\" stroke-dasharray=\"3 3\" d=\"M%n %nh24\"/>\n", x + 120, y + 6);
    svg_text(b, x + 150, y + 10, "", "end of its ramp");
}

/* Returns the first key that some query of some head attends to. */
static size_t first_key(const stx_attention_map *map) {
    size_t first = map->keys, r, j;
    for (r = 0; r < map->heads * map->queries; r++)
        for (j = 0; j < first; j++)
            if (map->weight[r * map->keys + j] >= SMALLEST) first = j;
    return first;
}

static int draw(const settings *o, panel *p, int layer, size_t layers) {
    const stx_attention_map *map = p->map;
    const double titles = map->span ? 260 : 60;
    const double top = 62, gap = 34;
    tr_buf b;
    size_t h, columns, stacked = 1, j;
    double left, above, step_x, step_y;
    char title[128], err[512];
    memset(&b, 0, sizeof b);
    p->first = first_key(map);
    for (j = p->first; j < map->keys; j++)
        if (map->key[j].tokens > stacked) stacked = map->key[j].tokens;
    measure_labels(p);
    left = 14 + CELL;
    above = 4 + CELL * (double)stacked;
    if (p->label > 1) {
        left = 14 + LETTER * (double)p->label;
        above = 6 + LETTER * (double)(p->label + 2 * (stacked > 1));
    }
    p->width = CELL * (double)(map->keys - p->first);
    p->height = CELL * (double)map->queries;
    /* a short text leaves room for the titles */
    step_x = (p->width < titles ? titles : p->width) + left + gap;
    step_y = p->height + above + 24 + gap;
    columns = step_x < 640 && map->heads > 1 ? 2 : 1;

    snprintf(title, sizeof title, "attention of layer %d of %u (%.60s)", layer, (unsigned)layers,
             o->checkpoint ? tr_name_of(o->checkpoint) : o->family);
    svg_add(&b, "%s", style);
    svg_text(&b, left, 24, " font-size=\"15\" font-weight=\"bold\"", title);
    svg_text(&b, left, 42, " class=\"faint\"",
             "Each row is a token of the segment; the columns are the keys that it attends to.");
    for (h = 0; h < map->heads; h++) {
        p->x = left + (double)(h % columns) * step_x;
        p->y = top + above + 28 + (double)(h / columns) * step_y;
        draw_head(&b, p, h, above);
    }
    double bottom = top + (double)((map->heads + columns - 1) / columns) * step_y;
    double width = left + (double)columns * step_x, least = left + 9 * (double)strlen(title);
    if (least < 640) least = 640;
    legend(&b, left, bottom, map->span != NULL);
    int ok = svg_save(o->picture, title, width < least ? least : width, bottom + 40, &b, err,
                      sizeof err);
    if (!ok) fprintf(stderr, "attention_map: %s\n", err);
    tr_buf_free(&b);
    return ok;
}


// >>numbers

/* Prints, for each head, its span, how far back it looks on average, and the share of its
   weight outside the segment. */
static void summary(const stx_attention_map *map) {
    fprintf(stderr, "head\tspan\tmean distance\tin memory\n");
    for (size_t h = 0; h < map->heads; h++) {
        double distance = 0, memory = 0, all = 0;
        for (size_t i = 0; i < map->queries; i++)
            for (size_t j = 0; j < map->keys; j++) {
                const stx_attention_key *k = &map->key[j];
                double w = map->weight[(h * map->queries + i) * map->keys + j];
                if (!k->tokens) continue;
                all += w;
                distance += w * (double)((ptrdiff_t)i - k->first);
                if (k->kind != STX_KEY_SEGMENT) memory += w;
            }
        fprintf(stderr, "%u\t%.1f\t%.1f\t%.0f %%\n", (unsigned)h + 1, map->span ? map->span[h] : 0,
                all > 0 ? distance / all : 0, all > 0 ? 100 * memory / all : 0);
    }
}

static int write_weights(const char *path, const stx_attention_map *map) {
    static const char *const kind[STX_KEY_KINDS] = {"zero", "compressed", "memory", "segment",
                                                    "persistent"};
    FILE *f = fopen(path, "w");
    if (f) fprintf(f, "head\tquery\tkey\tkind\tfirst\ttokens\tweight\n");
    for (size_t r = 0; f && r < map->heads * map->queries; r++)
        for (size_t j = 0; j < map->keys; j++)
            fprintf(f, "%u\t%u\t%u\t%s\t%ld\t%u\t%.9f\n", (unsigned)(r / map->queries) + 1,
                    (unsigned)(r % map->queries), (unsigned)j, kind[map->key[j].kind],
                    (long)map->key[j].first, (unsigned)map->key[j].tokens,
                    map->weight[r * map->keys + j]);
    int ok = f && !ferror(f);
    if (f && fclose(f)) ok = 0;
    if (!ok) fprintf(stderr, "attention_map: %s: cannot write: %s\n", path, strerror(errno));
    return ok;
}


// >>program

/* Returns a number from 0 to a million, or -1. */
static int number(const char *s) {
    char *end;
    const long v = strtol(s, &end, 10);
    return end == s || *end || v < 0 || v > 1000000 ? -1 : (int)v;
}

/* Reads the options. Returns 0 if they are not valid. */
static int options(int argc, char **argv, settings *o) {
    int c;
    o->family = "span";
    o->picture = "attention.svg";
    o->steps = 600;
    while ((c = getopt(argc, argv, "c:m:l:t:s:w:o:")) != -1)
        switch (c) {
        case 'c': o->checkpoint = optarg; break;
        case 'm': o->family = optarg; break;
        case 'l':
            if ((o->layer = number(optarg)) < 1) return 0;
            break;
        case 't': o->text = optarg; break;
        case 's': o->steps = number(optarg); break;
        case 'w': o->weights = optarg; break;
        case 'o': o->picture = optarg; break;
        default: return 0;
        }
    o->file = argv[optind];
    if (o->file && optind + 1 < argc) return 0;
    if (!o->checkpoint && o->file && !strcmp(o->file, "-")) return 0;   /* it is read repeatedly */
    return (o->file || (o->checkpoint && o->text)) && o->steps >= 0;
}

int main(int argc, char **argv) {
    settings o = {0};
    reading r = {0};
    panel p = {0};
    if (!options(argc, argv, &o)) {
        fputs("usage: attention_map -c CHECKPOINT [OPTIONS] -t TEXT    the text to read\n"
              "       attention_map -c CHECKPOINT [OPTIONS] FILE       its beginning; -: stdin\n"
              "       attention_map [-m span|compressive|par|sru] [-s STEPS] [OPTIONS] FILE\n"
              "                                  trains a model on the file, 600 steps\n"
              "options: -l LAYER        from 1 on; default: the last one with attention\n"
              "         -o PICTURE.svg  default: attention.svg; -: standard output\n"
              "         -w WEIGHTS.tsv  also write all weights\n", stderr);
        return 2;
    }
    stx_ctx *x = stx_create(NULL);
    r.segment = T;
    p.text = &r;
    if (o.checkpoint) {
        open_model(x, o.checkpoint, &r);
    } else {
        r.lm = model_of(x, o.family);
        r.vocab = stx_vocab_build(x, NULL, NULL, 0, 0); /* bytes */
        if (stx_ok(x)) train(&r.lm, r.vocab, o.file, o.steps);
    }

    int layer = o.layer, ok = 0;
    const stx_lm *lm = &r.lm;
    if (stx_ok(x)) encode(&r, o.text, o.file);
    if (stx_ok(x)) read_text(&r);
    if (stx_ok(x) && (size_t)layer > lm->layers)
        stx_fail(x, STX_ERR_ARG, "-l: expected a layer from 1 to %zu, got %d", lm->layers, layer);
    if (stx_ok(x) && layer > 0) p.map = lm->attention_map(lm->model, (size_t)layer - 1, 0);
    if (stx_ok(x) && !layer)
        for (layer = (int)lm->layers + 1; !p.map && layer-- > 1;)
            p.map = lm->attention_map(lm->model, (size_t)layer - 1, 0);
    if (p.map) {
        summary(p.map);
        ok = draw(&o, &p, layer, lm->layers) && (!o.weights || write_weights(o.weights, p.map));
    } else {
        if (stx_ok(x))
            stx_fail(x, STX_ERR_ARG, "%s has no attention", o.layer ? "this layer"
                     : "the model (an SRU of train_sru has it with --attention)");
        fprintf(stderr, "attention_map: %s\n", stx_error(x));
    }
    stx_vocab_free(r.vocab);
    stx_destroy(x);
    return !ok;
}
