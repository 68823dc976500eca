#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/files.h"
#include "../core/loops.h"
#include "../core/platform.h"
#include "../core/text.h"
#include "header.h"


// >>files: reading

STX_DEF stx_file *stx_file_open(stx_ctx *x, const char *path) {
    stx_file *f;
    if (!stx_ok(x)) return NULL;
    if (!path) {
        stx_fail(x, STX_ERR_ARG, "stx_file_open: expected a path, got NULL");
        return NULL;
    }
    f = (stx_file *)stx_block(x, sizeof *f);
    if (!f) return NULL;
    f->x = x;
    f->path = stx__copy(x, path);
    if (f->path && stx_map_open(x, &f->map, path) && stx__file_parse(f)) return f;
    stx_file_close(f);
    return NULL;
}

STX_DEF stx_file *stx_file_in_memory(stx_ctx *x, const char *name, const void *bytes, size_t n) {
    stx_file *f;
    if (!stx_ok(x)) return NULL;
    if (!name || !bytes) {
        stx_fail(x, STX_ERR_ARG,
                 "stx_file_in_memory: expected a name and bytes, got NULL for the %s",
                 name ? "bytes" : "name");
        return NULL;
    }
    f = (stx_file *)stx_block(x, sizeof *f);
    if (!f) return NULL;
    f->x = x;
    f->in_memory = 1;
    f->map.data = (const unsigned char *)bytes;
    f->map.size = n;
    f->path = stx__copy(x, name);
    if (f->path && stx__file_parse(f)) return f;
    stx_file_close(f);
    return NULL;
}

STX_DEF void stx_file_close(stx_file *f) {
    stx_ctx *x;
    if (!f) return;
    x = f->x;
    if (!f->in_memory) stx_map_close(&f->map);
    stx_block_free(x, f->path);
    stx_block_free(x, f->pool);
    stx_block_free(x, f->entry);
    stx_block_free(x, (void *)f->by_name);
    stx_block_free(x, f->meta);
    stx_block_free(x, f);
}

STX_DEF size_t stx_file_count(const stx_file *f) {
    return f ? f->count : 0;
}

STX_DEF const stx_entry *stx_file_entry(const stx_file *f, size_t i) {
    return f && i < f->count ? &f->entry[i] : NULL;
}

STX_DEF const stx_entry *stx_file_find(const stx_file *f, const char *name) {
    size_t lo = 0, hi = f && name ? f->count : 0;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        int c = strcmp(name, f->by_name[mid]->name);
        if (!c) return f->by_name[mid];
        if (c < 0)
            hi = mid;
        else
            lo = mid + 1;
    }
    return NULL;
}

STX_DEF const char *stx_file_meta(const stx_file *f, const char *key) {
    size_t lo = 0, hi = f && key ? f->nmeta : 0;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        int c = strcmp(key, f->meta[mid].key);
        if (!c) return f->meta[mid].value;
        if (c < 0)
            hi = mid;
        else
            lo = mid + 1;
    }
    return NULL;
}

static uint32_t stx__le32(const unsigned char *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static uint64_t stx__le64(const unsigned char *p) {
    return (uint64_t)stx__le32(p) | (uint64_t)stx__le32(p + 4) << 32;
}

static float stx__le_f32(const unsigned char *p) {
    uint32_t u = stx__le32(p);
    float v;
    memcpy(&v, &u, sizeof v);
    return v;
}

static double stx__le_f64(const unsigned char *p) {
    uint64_t u = stx__le64(p);
    double v;
    memcpy(&v, &u, sizeof v);
    return v;
}

/* Converts an F16 value to float, without rounding. The exponent has a different bias,
   and a subnormal F16 becomes a normal float. */
static float stx__le_f16(const unsigned char *p) {
    uint32_t sign = (uint32_t)(p[1] >> 7) << 31, u;
    uint32_t exponent = p[1] >> 2 & 31, fraction = (p[1] & 3u) << 8 | p[0];
    float v;
    if (!exponent && fraction) {
        exponent = 1;
        while (!(fraction & 0x400)) {
            fraction <<= 1;
            exponent--;
        }
        fraction &= 0x3FF;
    } else if (!exponent) {
        exponent = (uint32_t)-112;  /* zero */
    } else if (exponent == 31) {
        exponent = 255 - 112;       /* infinity, NaN */
    }
    u = sign | (exponent + 112) << 23 | fraction << 13;
    memcpy(&v, &u, sizeof v);
    return v;
}

static float stx__le_bf16(const unsigned char *p) {
    uint32_t u = (uint32_t)p[0] << 16 | (uint32_t)p[1] << 24;
    float v;
    memcpy(&v, &u, sizeof v);
    return v;
}

/* Returns 1 if the library can read the tensor. Otherwise sets an error and returns 0. */
static int stx__entry_readable(const stx_entry *e) {
    char q[STX_QUOTE], kind[STX_QUOTE];
    if (e->dtype != STX_OTHER) return 1;
    stx_quote(q, e->name, strlen(e->name));
    if (e->dims > STX_MAX_DIM) {
        stx_fail(e->file->x, STX_ERR_FORMAT,
                 "%s: \"%s\": expected at most %d dimensions, got %zu: reshape the tensor",
                 e->file->path, q, (int)STX_MAX_DIM, e->dims);
    } else {
        stx_quote(kind, e->kind, strlen(e->kind));
        stx_fail(e->file->x, STX_ERR_FORMAT,
                 "%s: \"%s\": dtype \"%s\" is not supported: convert the tensor to F32, F64, F16, "
                 "BF16, I32, I64 or U8", e->file->path, q, kind);
    }
    return 0;
}

static int stx__is_integer(int dtype) {
    return dtype == STX_I32 || dtype == STX_I64 || dtype == STX_U8;
}

static int stx__entry_check(const stx_entry *e, const void *out, size_t n, int integers) {
    char q[STX_QUOTE];
    if (!e || !stx_ok(e->file->x) || !stx__entry_readable(e)) return 0;
    stx_quote(q, e->name, strlen(e->name));
    if (n && !out) {
        stx_fail(e->file->x, STX_ERR_ARG, "%s: \"%s\": expected a buffer of %zu elements, got NULL",
                 e->file->path, q, n);
        return 0;
    }
    if (n != e->count) {
        stx_fail(e->file->x, STX_ERR_ARG, "%s: \"%s\" has %zu elements, but %zu were requested",
                 e->file->path, q, e->count, n);
        return 0;
    }
    if (stx__is_integer(e->dtype) != integers) {
        stx_fail(e->file->x, STX_ERR_FORMAT, "%s: \"%s\": expected %s, got %s", e->file->path, q,
                 integers ? "I32, I64 or U8" : "F32, F64, F16 or BF16", e->kind);
        return 0;
    }
    return 1;
}

STX_DEF int stx_entry_get_f32(const stx_entry *e, float *out, size_t n) {
    STX__FP_SCOPE;
    const unsigned char *p;
    size_t i;
    if (!stx__entry_check(e, out, n, 0)) return 0;
    p = (const unsigned char *)e->data;
    if (e->dtype == STX_F32)
        for (i = 0; i < n; i++) out[i] = stx__le_f32(p + 4 * i);
    else if (e->dtype == STX_F64)
        for (i = 0; i < n; i++) out[i] = (float)stx__le_f64(p + 8 * i);
    else if (e->dtype == STX_F16)
        for (i = 0; i < n; i++) out[i] = stx__le_f16(p + 2 * i);
    else
        for (i = 0; i < n; i++) out[i] = stx__le_bf16(p + 2 * i);
    return 1;
}

STX_DEF int stx_entry_get_f64(const stx_entry *e, double *out, size_t n) {
    const unsigned char *p;
    size_t i;
    if (!stx__entry_check(e, out, n, 0)) return 0;
    p = (const unsigned char *)e->data;
    if (e->dtype == STX_F32)
        for (i = 0; i < n; i++) out[i] = (double)stx__le_f32(p + 4 * i);
    else if (e->dtype == STX_F64)
        for (i = 0; i < n; i++) out[i] = stx__le_f64(p + 8 * i);
    else if (e->dtype == STX_F16)
        for (i = 0; i < n; i++) out[i] = (double)stx__le_f16(p + 2 * i);
    else
        for (i = 0; i < n; i++) out[i] = (double)stx__le_bf16(p + 2 * i);
    return 1;
}

STX_DEF int stx_entry_get_i64(const stx_entry *e, int64_t *out, size_t n) {
    const unsigned char *p;
    size_t i;
    if (!stx__entry_check(e, out, n, 1)) return 0;
    p = (const unsigned char *)e->data;
    if (e->dtype == STX_I32)
        for (i = 0; i < n; i++) out[i] = (int32_t)stx__le32(p + 4 * i);
    else if (e->dtype == STX_I64)
        for (i = 0; i < n; i++) out[i] = (int64_t)stx__le64(p + 8 * i);
    else
        for (i = 0; i < n; i++) out[i] = p[i];
    return 1;
}
