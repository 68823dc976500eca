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

STX_DEF const char *stx_file_path(const stx_file *f) {
    return f ? f->path : NULL;
}

static uint32_t stx__le16(const unsigned char *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8;
}

static uint32_t stx__le32(const unsigned char *p) {
    return stx__le16(p) | stx__le16(p + 2) << 16;
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

/* Returns the float with this sign, biased exponent and fraction of `bits` bits, which is
   exact. The exponent 0 marks zero and subnormal values. */
static float stx__small_float(uint32_t negative, uint32_t exponent, uint32_t fraction,
                              uint32_t bits, uint32_t bias) {
    uint32_t u;
    float v;
    if (!exponent && fraction) {    /* subnormal here, but not as a float */
        exponent = 1;
        while (!(fraction >> bits)) {
            fraction <<= 1;
            exponent--;
        }
        fraction &= (1u << bits) - 1;
    } else if (!exponent) {
        exponent = 0u - (127 - bias);
    }
    u = negative << 31 | (exponent + 127 - bias) << 23 | fraction << (23 - bits);
    memcpy(&v, &u, sizeof v);
    return v;
}

/* An exponent of 31 marks infinity and NaN. */
static float stx__f16(uint32_t u) {
    const uint32_t exponent = u >> 10 & 31;
    return stx__small_float(u >> 15, exponent == 31 ? 255 - 112 : exponent, u & 0x3FF, 10, 15);
}

/* F8_E4M3 has no infinity, and its NaN is the largest magnitude; the others reach 448. */
static float stx__f8_e4m3(uint32_t u) {
    const uint32_t nan = (u & 0x7F) == 0x7F;
    return stx__small_float(u >> 7, nan ? 255 - 120 : u >> 3 & 15, u & 7, 3, 7);
}

static float stx__bf16_at(const unsigned char *p) {
    uint32_t u = stx__le16(p) << 16;
    float v;
    memcpy(&v, &u, sizeof v);
    return v;
}

/* Returns an element of type F32, F16, BF16, F8_E4M3 or F8_E5M2. */
static float stx__le_float(int dtype, const unsigned char *p) {
    if (dtype == STX_F32) return stx__le_f32(p);
    if (dtype == STX_BF16) return stx__bf16_at(p);
    if (dtype == STX_F16) return stx__f16(stx__le16(p));
    if (dtype == STX_F8_E5M2) return stx__f16((uint32_t)*p << 8);   /* the upper byte of an F16 */
    return stx__f8_e4m3(*p);
}

/* Returns an element of an integer type. A U64 above 2^63 - 1 becomes negative. */
static int64_t stx__le_int(int dtype, const unsigned char *p) {
    switch (dtype) {
    case STX_BOOL: return *p != 0;
    case STX_I8: return (int8_t)*p;
    case STX_I16: return (int16_t)stx__le16(p);
    case STX_U16: return stx__le16(p);
    case STX_I32: return (int32_t)stx__le32(p);
    case STX_U32: return stx__le32(p);
    case STX_I64:
    case STX_U64: return (int64_t)stx__le64(p);
    default: return *p; /* STX_U8 */
    }
}

/* Returns 1 if the library can read the tensor. Otherwise sets an error and returns 0. */
static int stx__entry_readable(const stx_entry *e) {
    char q[STX_QUOTE], kind[STX_QUOTE];
    if (e->dtype != STX_OTHER && e->dtype != STX_C64) return 1;
    stx_quote(q, e->name, strlen(e->name));
    if (e->dims > STX_ENTRY_DIM) {
        stx_fail(e->file->x, STX_ERR_FORMAT,
                 "%s: \"%s\": expected at most %d dimensions, got %zu: reshape the tensor",
                 e->file->path, q, STX_ENTRY_DIM, e->dims);
    } else {
        stx_quote(kind, e->kind, strlen(e->kind));
        stx_fail(e->file->x, STX_ERR_FORMAT,
                 "%s: \"%s\": dtype \"%s\" is not supported: convert the tensor to F32 or another "
                 "real or integer type", e->file->path, q, kind);
    }
    return 0;
}

static int stx__is_integer(int dtype) {
    return dtype == STX_I32 || dtype == STX_I64 || dtype == STX_U8
           || (dtype >= STX_BOOL && dtype <= STX_U64);
}

static int stx__entry_check(const stx_entry *e, const void *out, size_t n) {
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
    return 1;
}

/* Checks that all elements are integers that fit in an int64_t. */
static int stx__entry_fits_i64(const stx_entry *e) {
    char q[STX_QUOTE];
    const unsigned char *p = (const unsigned char *)e->data;
    size_t i = 0;
    if (stx__is_integer(e->dtype)) {
        if (e->dtype != STX_U64) return 1;
        while (i < e->count && p[8 * i + 7] < 0x80) i++;
        if (i == e->count) return 1;
    }
    stx_quote(q, e->name, strlen(e->name));
    if (e->dtype == STX_U64)
        stx_fail(e->file->x, STX_ERR_FORMAT,
                 "%s: \"%s\": expected values of at most 2^63 - 1, got %llu at index %zu: read "
                 "them as floating-point numbers", e->file->path, q,
                 (unsigned long long)stx__le64(p + 8 * i), i);
    else
        stx_fail(e->file->x, STX_ERR_FORMAT,
                 "%s: \"%s\": expected an integer type or BOOL, got %s", e->file->path, q, e->kind);
    return 0;
}

STX_DEF int stx_entry_get_f32(const stx_entry *e, float *out, size_t n) {
    STX__FP_SCOPE;
    const unsigned char *p;
    size_t i, size;
    if (!stx__entry_check(e, out, n)) return 0;
    p = (const unsigned char *)e->data;
    size = stx_dtype_size(e->dtype);
    if (e->dtype == STX_F32)
        for (i = 0; i < n; i++) out[i] = stx__le_f32(p + 4 * i);
    else if (e->dtype == STX_F64)
        for (i = 0; i < n; i++) out[i] = (float)stx__le_f64(p + 8 * i);
    else if (e->dtype == STX_U64)
        for (i = 0; i < n; i++) out[i] = (float)stx__le64(p + 8 * i);
    else if (stx__is_integer(e->dtype))
        for (i = 0; i < n; i++) out[i] = (float)stx__le_int(e->dtype, p + size * i);
    else
        for (i = 0; i < n; i++) out[i] = stx__le_float(e->dtype, p + size * i);
    return 1;
}

STX_DEF int stx_entry_get_f64(const stx_entry *e, double *out, size_t n) {
    STX__FP_SCOPE;
    const unsigned char *p;
    size_t i, size;
    if (!stx__entry_check(e, out, n)) return 0;
    p = (const unsigned char *)e->data;
    size = stx_dtype_size(e->dtype);
    if (e->dtype == STX_F64)
        for (i = 0; i < n; i++) out[i] = stx__le_f64(p + 8 * i);
    else if (e->dtype == STX_U64)
        for (i = 0; i < n; i++) out[i] = (double)stx__le64(p + 8 * i);
    else if (stx__is_integer(e->dtype))
        for (i = 0; i < n; i++) out[i] = (double)stx__le_int(e->dtype, p + size * i);
    else
        for (i = 0; i < n; i++) out[i] = (double)stx__le_float(e->dtype, p + size * i);
    return 1;
}

STX_DEF int stx_entry_get_i64(const stx_entry *e, int64_t *out, size_t n) {
    const unsigned char *p;
    size_t i, size;
    if (!stx__entry_check(e, out, n) || !stx__entry_fits_i64(e)) return 0;
    p = (const unsigned char *)e->data;
    size = stx_dtype_size(e->dtype);
    for (i = 0; i < n; i++) out[i] = stx__le_int(e->dtype, p + size * i);
    return 1;
}
