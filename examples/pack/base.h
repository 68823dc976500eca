/* pack/base.h - errors, growing byte strings, files and digests. pack is a program for
   one file: each error ends it, so that no function here returns one. */
#pragma once
#include "../train/base.h"
#include "../train/files.h"
#include "../../seqtx.h"

static void die(const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    fputs("pack: ", stderr);
    vfprintf(stderr, fmt, args);
    fputc('\n', stderr);
    va_end(args);
    exit(1);
}

static void *memory(void *p, size_t n, size_t size) {
    if (size && n > SIZE_MAX / 2 / size) die("out of memory");
    p = realloc(p, n * size + 1);
    if (!p) die("out of memory");
    return p;
}


// >>bytes

typedef struct bytes {
    unsigned char *p;
    size_t n, capacity;
} bytes;

static void put(bytes *b, const void *p, size_t n) {
    if (b->capacity - b->n < n) {
        b->capacity = b->n + b->n / 2 + n + 64;
        b->p = (unsigned char *)memory(b->p, b->capacity, 1);
    }
    memcpy(b->p + b->n, p, n);
    b->n += n;
}

static void put_byte(bytes *b, unsigned v) {
    unsigned char c = (unsigned char)v;
    put(b, &c, 1);
}

/* 7 bits per byte, the lowest first; all bytes but the last have bit 7. */
static void put_number(bytes *b, uint64_t v) {
    for (; v > 127; v >>= 7) put_byte(b, (unsigned)(v & 127) | 128);
    put_byte(b, (unsigned)v);
}

static void put_64(bytes *b, uint64_t v) {
    for (int i = 0; i < 8; i++) put_byte(b, (unsigned)(v >> (8 * i)) & 255);
}

static uint64_t get_64(const unsigned char *p) {
    uint64_t v = 0;
    for (int i = 0; i < 8; i++) v |= (uint64_t)p[i] << (8 * i);
    return v;
}

/* Any change of one byte changes the result: each step is a bijection of the key. */
static uint64_t digest(const unsigned char *p, size_t n) {
    uint64_t key = stx_key_add(14695981039346656037u, n);
    for (; n >= 8; n -= 8, p += 8) key = stx_key_add(key, get_64(p));
    for (; n; n--) key = stx_key_add(key, *p++);
    return key;
}


// >>files

static void read_all(bytes *b, const char *path) {
    static unsigned char part[1 << 16];
    FILE *f = strcmp(path, "-") ? fopen(path, "rb") : stdin;
    size_t n;
    if (!f) die("%s: cannot be opened", path);
    while ((n = fread(part, 1, sizeof part, f)) > 0) put(b, part, n);
    if (ferror(f)) die("%s: cannot be read", path);
    if (f != stdin) fclose(f);
}

/* The file gets its name when it is complete. */
static void write_all(const bytes *b, const char *path, int force) {
    char err[TR_ERR];
    FILE *f;
    if (!strcmp(path, "-")) {
        if (fwrite(b->p, 1, b->n, stdout) != b->n || fflush(stdout))
            die("standard output: cannot be written");
        return;
    }
    if (!force && (f = fopen(path, "rb")) != NULL) {
        fclose(f);
        die("%s: exists; -f replaces it", path);
    }
    if (!tr_replace(path, b->p, b->n, err, sizeof err)) die("%s", err);
}
