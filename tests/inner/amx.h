/* amx.h - emulates the AMX tile instructions in C, so that stx__micro_amx_run can be
   tested on processors without AMX and under sanitizers. Include before the
   implementation of seqtx.h. The tiles of a thread are NaN until they are written.
   Loads and stores access only the configured rows and bytes. */
#ifndef STX_TEST_AMX_H
#define STX_TEST_AMX_H
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
  #include <stdint.h>
  #include <string.h>
  #include <immintrin.h>

static __thread uint32_t amx_tile[8][16][16];
/* Byte 0 is the palette, byte 16 + 2 t the low byte of the row length of tile t (in
   bytes), and byte 48 + t its number of rows. */
static __thread uint8_t amx_config[64];

static int amx_rows(int t) {
    return amx_config[0] == 1 ? amx_config[48 + t] : 0;
}

static size_t amx_bytes(int t) {
    return amx_config[16 + 2 * t];
}

static void amx_loadconfig(const void *from) {
    memcpy(amx_config, from, sizeof amx_config);
    memset(amx_tile, 0xff, sizeof amx_tile);
}

static void amx_load(int t, const void *p, size_t stride) {
    int r;
    for (r = 0; r < amx_rows(t); r++)
        memcpy(amx_tile[t][r], (const char *)p + (size_t)r * stride, amx_bytes(t));
}

static void amx_store(int t, void *p, size_t stride) {
    int r;
    for (r = 0; r < amx_rows(t); r++)
        memcpy((char *)p + (size_t)r * stride, amx_tile[t][r], amx_bytes(t));
}

static float amx_float(uint32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* Computes c += a b. Sanitizers do not check this function, because all indices are
   within the arrays. */
__attribute__((no_sanitize("address"), no_sanitize("undefined")))
static void amx_dot(int c, int a, int b) {
    float low[16][16], high[16][16], s[16];
    int m, n, k;
    for (k = 0; k < 16; k++)
        for (n = 0; n < 16; n++) {
            low[k][n] = amx_float(amx_tile[b][k][n] << 16);
            high[k][n] = amx_float(amx_tile[b][k][n] & 0xffff0000u);
        }
    for (m = 0; m < 16; m++) {
        memcpy(s, amx_tile[c][m], sizeof s);
        for (k = 0; k < 16; k++) {
            float x = amx_float(amx_tile[a][m][k] << 16),
                  y = amx_float(amx_tile[a][m][k] & 0xffff0000u);
            for (n = 0; n < 16; n++) s[n] += x * low[k][n] + y * high[k][n];
        }
        memcpy(amx_tile[c][m], s, sizeof s);
    }
}

/* The following macros replace those of <immintrin.h>. */
  #undef _tile_loadconfig
  #undef _tile_release
  #undef _tile_zero
  #undef _tile_loadd
  #undef _tile_stored
  #undef _tile_dpbf16ps
  #define _tile_loadconfig(from)     amx_loadconfig(from)
  #define _tile_release()            memset(amx_config, 0, sizeof amx_config)
  #define _tile_zero(t)              memset(amx_tile[t], 0, sizeof amx_tile[t])
  #define _tile_loadd(t, p, stride)  amx_load(t, p, stride)
  #define _tile_stored(t, p, stride) amx_store(t, p, stride)
  #define _tile_dpbf16ps(c, a, b)    amx_dot(c, a, b)

/* seqtx.h uses these definitions instead of those that it contains. */
  #define STX__AMX
  #define STX__AMX_EMULATED 1

static int stx__has_amx(void) {
    return 1;
}
#endif
#endif
