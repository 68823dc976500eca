/* pack.c - packs a file, or many small records, with a model of any family as the
   statistics of an arithmetic coder. docs/pack.md explains how, and compares.

       cc -O3 pack.c -lm -pthread -o pack
       ./pack -m run.safetensors my.txt                   my.txt.pack
       ./pack -d -m run.safetensors my.txt.pack           my.txt again
       ./pack --help

   The format of the files and the options are here. The parts, from the bottom up:
   coder.h (bits of symbols), counts.h (statistics of texts), mix.h (one token), model.h
   (from log-probabilities to integers), lanes.h (many records in lockstep), adapt.h
   (--adapt), records.h (groups of lanes) and dictionary.h (--dictionary).

   A packed file, with integers as in put_number unless a size is given:

       "stxpack", version      8 bytes
       flags                   FLAG_.. below
       digest of the model     8 bytes
       digest of the content   8 bytes
       lanes, length of the prompt, the prompt, records
       per record: its length less that of the record before; its packed length
       the packed records, in order
       digest of all of this   8 bytes */
#include "train.h"
#define SEQTX_IMPLEMENTATION
#include "../seqtx_attn_span.h"
#include "../seqtx_compressive.h"
#include "../seqtx_par.h"
#include "../seqtx_sru.h"
#include "../seqtx_text.h"
#include "pack/base.h"
#include "pack/coder.h"
#include "pack/counts.h"
#include "pack/mix.h"
#include "pack/model.h"
#include "pack/lanes.h"
#include "pack/adapt.h"
#include "pack/records.h"
#include "pack/dictionary.h"

static const char magic[8] = {'s', 't', 'x', 'p', 'a', 'c', 'k', 2 /* version */};

enum { FLAG_ADAPT = 1, FLAG_NOTHING = 2 /* the model learns from nothing */,
       FLAG_WHOLE = 4 /* the parts of a file, not records */ };

typedef struct options {
    const char *in, *out, *model, *records, *prompt, *dictionary;
    size_t record, lanes;
    int unpack, force, adapt, threads;
} options;


// >>packing

/* Returns the length of the next record of a text: KIND is file, lines, nul, or a number
   of bytes. */
static size_t record_size(const char *kind, const unsigned char *s, size_t n, size_t part) {
    const unsigned char *end = NULL;
    if (!strcmp(kind, "lines")) end = (const unsigned char *)memchr(s, '\n', n);
    else if (!strcmp(kind, "nul")) end = (const unsigned char *)memchr(s, 0, n);
    else return STX_MIN(part, n);
    return end ? (size_t)(end - s) + 1 : n;
}

/* Opens the model and the dictionary for n records. expected: the digest of the model
   that packed them, or NULL. */
static void set_up(pack *p, const options *o, unsigned flags, const uint64_t *expected,
                   const record *r, size_t n) {
    model_open(&p->m, flags & FLAG_NOTHING ? NULL : o->model, o->threads);
    p->t.in_word = letters(&p->m);
    p->t.depth = p->m.depth;
    if (o->dictionary) dictionary_open(p, o->dictionary);
    if (expected && p->m.digest != *expected)
        die("%s: packed with another model or dictionary (or without one)", o->in);
    mixing_begin(&p->learned);
    if (p->t.known) dictionary_read(p, r, n);
    p->shared = p->serial = (flags & (FLAG_ADAPT | FLAG_WHOLE)) != 0;
    if (!p->shared && !p->t.known) p->learned.speed = 2;
    if (flags & FLAG_ADAPT) adapt_begin(p, (flags & FLAG_NOTHING) != 0);
}

static void pack_file(pack *p, const options *o, const bytes *in, bytes *out) {
    const unsigned flags = (o->adapt ? FLAG_ADAPT : 0) | (o->model ? 0 : FLAG_NOTHING)
                         | (strcmp(o->records, "file") ? 0 : FLAG_WHOLE);
    const int whole = flags & FLAG_WHOLE;
    size_t n = 0, part, most;
    record *r = NULL;
    p->lanes = o->lanes;
    most = flags & FLAG_ADAPT ? 16 : 64;
    if (!p->lanes) p->lanes = whole ? STX_MIN(in->n / 16384, most) : 128;
    p->lanes = STX_MAX(p->lanes, 1);
    part = whole ? (in->n + p->lanes - 1) / p->lanes : (size_t)strtoull(o->records, NULL, 10);
    for (size_t at = 0; at < in->n; at += r[n++].size) {
        if ((n & (n - 1)) == 0) r = (record *)memory(r, 2 * n + 1, sizeof *r);
        memset(&r[n], 0, sizeof *r);
        r[n].index = n;
        r[n].from = in->p + at;
        r[n].size = record_size(o->records, in->p + at, in->n - at, part);
    }
    if (n) {        /* no more lanes than the same number of groups needs */
        const size_t groups = (n + p->lanes - 1) / p->lanes;
        p->lanes = (n + groups - 1) / groups;
    }
    put(&p->prompt, o->prompt, strlen(o->prompt));
    set_up(p, o, flags, NULL, r, n);
    code_records(p, r, n, SIZE_MAX);

    put(out, magic, sizeof magic);
    put_byte(out, flags);
    put_64(out, p->m.digest);
    put_64(out, digest(in->p, in->n));
    put_number(out, p->lanes);
    put_number(out, p->prompt.n);
    put(out, p->prompt.p, p->prompt.n);
    put_number(out, n);
    for (size_t i = 0; i < n; i++) {
        const size_t size = r[i].size, before = i ? r[i - 1].size : 0;
        put_number(out, size >= before ? 2 * (size - before) : 2 * (before - size) - 1);
        put_number(out, r[i].to.n);
    }
    for (size_t i = 0; i < n; i++) put(out, r[i].to.p, r[i].to.n);
    put_64(out, digest(out->p, out->n));
}


// >>unpacking

/* The position in a packed file. */
typedef struct reader {
    const char *path;
    const unsigned char *p, *end;
} reader;

static const unsigned char *get(reader *r, size_t n) {
    if ((size_t)(r->end - r->p) < n) die("%s: damaged: it ends too early", r->path);
    return (r->p += n) - n;
}

static size_t get_number(reader *r) {
    uint64_t v = 0;
    unsigned c = 128;
    for (int shift = 0; c & 128; shift += 7) {
        c = *get(r, 1);
        if (shift > 56 || (v |= (uint64_t)(c & 127) << shift) > SIZE_MAX / 4)
            die("%s: damaged: a number is too large", r->path);
    }
    return (size_t)v;
}

static void unpack_file(pack *p, const options *o, const bytes *in, bytes *out) {
    reader f;
    f.path = o->in;
    f.p = in->p;
    f.end = in->p + in->n;
    if (in->n < sizeof magic || memcmp(in->p, magic, sizeof magic - 1))
        die("%s: not a packed file", f.path);
    if (in->p[7] != magic[7])
        die("%s: has version %d of the format, this program reads version %d", f.path, in->p[7],
            magic[7]);
    if (in->n < 36 || digest(in->p, in->n - 8) != get_64(f.end - 8))
        die("%s: damaged or cut off: its digest does not match", f.path);
    f.end -= 8;
    get(&f, sizeof magic);
    const unsigned flags = *get(&f, 1);
    const uint64_t expected = get_64(get(&f, 8));
    const uint64_t content = get_64(get(&f, 8));
    p->unpacking = 1;
    p->lanes = get_number(&f);
    const size_t prompt = get_number(&f);
    put(&p->prompt, get(&f, prompt), prompt);
    const size_t n = get_number(&f);
    if (!p->lanes || p->lanes > MAX_LANES || n > in->n || flags > 7)
        die("%s: damaged: impossible sizes", f.path);

    record *r = (record *)memory(NULL, n, sizeof *r);
    for (size_t i = 0; i < n; i++) {
        const size_t change = get_number(&f), before = i ? r[i - 1].size : 0;
        memset(&r[i], 0, sizeof *r);
        r[i].index = i;
        r[i].size = change & 1 ? before - (change + 1) / 2 : before + change / 2;
        r[i].from_size = get_number(&f);
        if (!r[i].size || r[i].size > SIZE_MAX / 4) die("%s: damaged: impossible sizes", f.path);
    }
    for (size_t i = 0; i < n; i++) r[i].from = get(&f, r[i].from_size);
    if (f.p != f.end) die("%s: damaged: it is too long", f.path);
    if (o->record && o->record > n) die("--record %zu: the file has %zu records", o->record, n);
    if (o->record && flags & (FLAG_ADAPT | FLAG_WHOLE))
        die("--record: records that were packed with --adapt, and parts of a file, depend on each "
            "other");
    if (!o->model && !(flags & FLAG_NOTHING))
        die("%s: needs -m with the model that packed it", f.path);
    set_up(p, o, flags, &expected, r, n);
    code_records(p, r, n, o->record ? o->record - 1 : SIZE_MAX);
    for (size_t i = 0; i < n; i++) put(out, r[i].to.p, r[i].to.n);
    if (!o->record && digest(out->p, out->n) != content)
        die("%s: cannot be unpacked: the results of this build or processor differ; see "
            "docs/bits.md", f.path);
}


// >>options

static const char help[] =
    "Packs a file with a model that a trainer saved as the statistics of an\n"
    "arithmetic coder. The same model unpacks it, on any processor.\n\n"
    "  pack -m MODEL FILE               writes FILE.pack\n"
    "  pack -d -m MODEL FILE.pack       unpacks it\n"
    "  pack --adapt FILE                without a model: learns as it packs\n\n"
    "  -m, --model FILE    checkpoint of a trainer, of any family, for bytes or\n"
    "                      characters\n"
    "  -d, --unpack        unpack\n"
    "  -o, --output FILE   instead of FILE.pack, or FILE without .pack; -: standard\n"
    "                      output\n"
    "  -f, --force         replace an existing file\n"
    "  --records KIND      each record by itself: lines, nul (records that end with\n"
    "                      a zero byte), or a number of bytes\n"
    "  --record N          with -d: only record N, counted from 1\n"
    "  --prompt TEXT       what the model reads before each record (a line end)\n"
    "  --dictionary FILE   text of the kind, such as the training text, whose\n"
    "                      statistics are mixed with the model's; a part of the\n"
    "                      model: unpacking needs it, too\n"
    "  --adapt             learn from what is packed; slow\n"
    "  --lanes N           parts of a file, or records, that are coded in lockstep\n"
    "  -t, --threads N     number of threads; 0: all\n\n"
    "FILE - is standard input. A packed file can only be unpacked with the model\n"
    "that packed it: keep it.\n";

static void parse(options *o, int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
        const int is_short = a[0] == '-' && a[1] && a[1] != '-';
        if (!strcmp(a, "-h") || !strcmp(a, "--help")) {
            fputs(help, stdout);
            exit(0);
        } else if (!strcmp(a, "-d") || !strcmp(a, "--unpack")) o->unpack = 1;
        else if (!strcmp(a, "-f") || !strcmp(a, "--force")) o->force = 1;
        else if (!strcmp(a, "--adapt")) o->adapt = 1;
        else if (!is_short && strncmp(a, "--", 2)) {
            if (o->in) die("one file at a time: %s or %s? (--help)", o->in, a);
            o->in = a;
        } else {
            static const char *const with_number[] = {"--record", "--lanes", "--threads"};
            size_t number = 0;
            char *end = NULL;
            if (!strcmp(a, "-t")) a = with_number[2];
            if (!value) die("%s: needs a value, or is unknown (--help)", a);
            for (int k = 0; k < 3; k++) {
                if (strcmp(a, with_number[k])) continue;
                number = (size_t)strtoull(value, &end, 10);
                const size_t most = k ? (size_t)MAX_LANES : SIZE_MAX / 2;
                if (*value < '0' || *value > '9' || *end || number > most)
                    die("%s: expected a number, got %s", a, value);
            }
            if (!strcmp(a, "-m") || !strcmp(a, "--model")) o->model = value;
            else if (!strcmp(a, "-o") || !strcmp(a, "--output")) o->out = value;
            else if (!strcmp(a, "--records")) o->records = value;
            else if (!strcmp(a, "--prompt")) o->prompt = value;
            else if (!strcmp(a, "--dictionary")) o->dictionary = value;
            else if (!strcmp(a, "--record")) o->record = number;
            else if (!strcmp(a, "--lanes")) o->lanes = number;
            else if (!strcmp(a, "--threads")) o->threads = (int)number;
            else die("%s: unknown option (--help)", a);
            i++;
        }
    }
    if (!o->in) die("expected a file (--help)");
    if (strcmp(o->records, "file") && strcmp(o->records, "lines") && strcmp(o->records, "nul")
        && (*o->records < '1' || *o->records > '9'))
        die("--records: expected lines, nul or a number of bytes, got %s", o->records);
    if (!o->unpack && !o->model && !o->adapt) die("needs -m MODEL, or --adapt (--help)");
    if (o->out) return;

    /* FILE.pack, or FILE without .pack */
    const size_t n = strlen(o->in);
    char *name = (char *)memory(NULL, n + 6, 1);
    strcpy(name, o->in);
    o->out = name;
    if (!strcmp(name, "-")) return;
    if (!o->unpack) strcat(name, ".pack");
    else if (n > 5 && !strcmp(name + n - 5, ".pack")) name[n - 5] = 0;
    else die("%s: does not end in .pack: name the output with -o", o->in);
}

int main(int argc, char **argv) {
    options o;
    pack p;
    bytes in = {NULL, 0, 0}, out = {NULL, 0, 0};
    memset(&o, 0, sizeof o);
    memset(&p, 0, sizeof p);
    o.records = "file";
    o.prompt = "\n";
    parse(&o, argc, argv);
    read_all(&in, o.in);
    fill_powers();
    fill_mixing_tables();
    p.terminal = isatty(2);
    p.began = time(NULL);
    if (o.unpack) unpack_file(&p, &o, &in, &out);
    else pack_file(&p, &o, &in, &out);
    write_all(&out, o.out, o.force);
    stx_vocab_free(p.m.vocab);
    stx_destroy(p.m.x);
    return 0;
}
