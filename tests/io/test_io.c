/* test_io.c - tests of seqtx_text.h and of the section >>files of seqtx.h: safetensors,
   atomic writing, vocabularies, corpora, batches.

       cc -std=c99 -DSEQTX_IMPLEMENTATION tests/io/test_io.c -o test_io -lm

   Prints failures and, in the last line, "N passed, N failed". test_io --export FILE
   writes a sample file for other readers. test_io --import FILE prints the content of a
   file. */

#ifndef _GNU_SOURCE
  #define _GNU_SOURCE
#endif
#include "../../seqtx.h"
#include "../../seqtx_text.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "../files.h"
#ifdef __linux__
  #include <sched.h>
  #include <sys/mount.h>
  #include <sys/syscall.h>
#endif

static int skipped;

/* Checks that the context has an error with this code and that its text contains
   `part`. Clears the error. */
static int check_error(stx_ctx *x, int code, const char *part, int line) {
    int ok = !stx_ok(x) && stx_error_code(x) == code && strstr(stx_error(x), part) != NULL;
    if (!test_check(ok, "another error", __FILE__, line))
        printf("  expected error %d [..%s..]\n  got %d [%s]\n", code, part, stx_error_code(x),
               stx_error(x));
    stx_clear_error(x);
    return ok;
}

#define ERROR(code, part) check_error(x, code, part, __LINE__)
#define FINE()            check_fine(x, __LINE__)

static void check_fine(stx_ctx *x, int line) {
    if (!test_check(stx_ok(x), "unexpected error", __FILE__, line))
        printf("  %s\n", stx_error(x));
    stx_clear_error(x);
}

static void skip(const char *what) {
    skipped++;
    printf("skipped: %s\n", what);
}


// >>context: an allocator that counts live allocations and can fail at the n-th one

typedef struct {
    long n, fail_at, live;
} counter;

static void *count_alloc(void *user, size_t n) {
    counter *c = (counter *)user;
    void *p = NULL;
    if (c->n != c->fail_at) p = malloc(n > 0 ? n : 1);
    c->n++;
    if (p) c->live++;
    return p;
}

static void count_release(void *user, void *p) {
    if (p) {
        ((counter *)user)->live--;
        free(p);
    }
}

static stx_ctx *context(counter *c) {
    stx_desc d;
    memset(&d, 0, sizeof d);
    memset(c, 0, sizeof *c);
    c->fail_at = -1;
    d.alloc = count_alloc;
    d.release = count_release;
    d.user = c;
    return stx_create(&d);
}

static counter count;
static stx_ctx *x; /* the context that all tests share */


// >>files

static const char *put_bytes(const char *name, const void *data, size_t n) {
    const char *path = in_dir(name);
    put_file(path, data, n);
    return path;
}

static const char *put_text(const char *name, const char *text) {
    return put_bytes(name, text, strlen(text));
}


// >>calls: wrappers of system calls, which record events and simulate failures

#ifdef __linux__
static char events[64]; /* F: fsync of a file, D: fsync of a directory, R: rename */
static int fail_fsync, fail_rename, fail_dir;
static int inherited; /* number of files opened without O_CLOEXEC */

enum {
    OPEN, WRITE, FSYNC, RENAME, CLOSE, FCHMOD,
    UNLINK, STAT, FSTAT, ACCESS, READLINK, FCNTL, CALLS
};

/* Call number `at` of the selected kind fails. If `all` is set, so do all later calls. */
static struct {
    int on, call, at, all, code, short_write;
    int count[CALLS];
} fault;

static int fails(int call) {
    if (!fault.on) return 0;
    fault.count[call]++;
    if (call != fault.call || fault.count[call] < fault.at) return 0;
    if (!fault.all && fault.count[call] > fault.at) return 0;
    errno = fault.code;
    return 1;
}

static void event(char c) {
    size_t n = strlen(events);
    if (n < sizeof events - 1) {
        events[n] = c;
        events[n + 1] = 0;
    }
}

int open(const char *path, int flags, ...) {
    va_list ap;
    int mode;
    va_start(ap, flags);
    mode = flags & O_CREAT ? va_arg(ap, int) : 0;
    va_end(ap);
    if (fails(OPEN)) return -1;
    inherited += !(flags & O_CLOEXEC);
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

ssize_t write(int fd, const void *data, size_t n) {
    if (fails(WRITE)) {
        if (!fault.short_write) return -1;
        n = (n + 1) / 2;
    }
    return syscall(SYS_write, fd, data, n);
}

int fsync(int fd) {
    struct stat st;
    int is_dir = fstatat(fd, "", &st, AT_EMPTY_PATH) == 0 && S_ISDIR(st.st_mode);
    event(is_dir ? 'D' : 'F');
    if (is_dir ? fail_dir : fail_fsync) {
        errno = is_dir ? fail_dir : fail_fsync;
        return -1;
    }
    return fails(FSYNC) ? -1 : (int)syscall(SYS_fsync, fd);
}

int rename(const char *from, const char *to) {
    event('R');
    if (fail_rename) {
        errno = fail_rename;
        return -1;
    }
    return fails(RENAME) ? -1 : renameat(AT_FDCWD, from, AT_FDCWD, to);
}

int close(int fd) {
    int failed_ = fails(CLOSE), done = (int)syscall(SYS_close, fd);
    if (failed_) errno = fault.code;
    return failed_ ? -1 : done;
}

int fchmod(int fd, mode_t mode) {
    return fails(FCHMOD) ? -1 : (int)syscall(SYS_fchmod, fd, mode);
}

int unlink(const char *path) {
    return fails(UNLINK) ? -1 : unlinkat(AT_FDCWD, path, 0);
}

int stat(const char *path, struct stat *st) {
    return fails(STAT) ? -1 : fstatat(AT_FDCWD, path, st, 0);
}

int fstat(int fd, struct stat *st) {
    return fails(FSTAT) ? -1 : fstatat(fd, "", st, AT_EMPTY_PATH);
}

int access(const char *path, int how) {
    return fails(ACCESS) ? -1 : (int)syscall(SYS_faccessat, AT_FDCWD, path, how);
}

ssize_t readlink(const char *path, char *to, size_t n) {
    return fails(READLINK) ? -1 : readlinkat(AT_FDCWD, path, to, n);
}

int fcntl(int fd, int what, ...) {
    va_list ap;
    void *p;
    va_start(ap, what);
    p = va_arg(ap, void *);
    va_end(ap);
    return fails(FCNTL) ? -1 : (int)syscall(SYS_fcntl, fd, what, p);
}
#endif


// >>safetensors: round trips

static const char odd_name[] =
    "q\"\\/\b\f\n\r\t\x01\x7F k\xC3\xA4se \xE2\x82\xAC \xF0\x9F\x98\x80";
static const float sample_f32[6] = {1.5f, -2, 3, 0, 1e-40f, 7};
static const double sample_f64[2] = {3.141592653589793, -1e300};
static const uint16_t sample_bf16[3] = {0x3F80, 0xC040, 0x7F80};
static const int32_t sample_i32[2] = {-5, 2147483647};
static const int64_t sample_i64[2] = {INT64_MIN, 77};
static const unsigned char sample_u8[3] = {0, 10, 255};

static void write_samples(const char *path) {
    size_t d23[2] = {2, 3}, d2[1] = {2}, d3[1] = {3}, zero[3] = {4, 0, 2}, ones[STX_ENTRY_DIM], i;
    stx_writer *w = stx_writer_create(x);
    for (i = 0; i < STX_ENTRY_DIM; i++) ones[i] = 1;
    EXPECT(stx_writer_add(w, "bytes", STX_U8, 1, d3, sample_u8) == 1);
    EXPECT(stx_writer_add(w, "layer.0.w", STX_F32, 2, d23, sample_f32) == 1);
    EXPECT(stx_writer_add(w, "f64", STX_F64, 1, d2, sample_f64) == 1);
    EXPECT(stx_writer_add(w, "bf16", STX_BF16, 1, d3, sample_bf16) == 1);
    EXPECT(stx_writer_add(w, odd_name, STX_I32, 1, d2, sample_i32) == 1);
    EXPECT(stx_writer_add(w, "i64", STX_I64, 1, d2, sample_i64) == 1);
    EXPECT(stx_writer_add(w, "scalar", STX_F32, 0, NULL, sample_f32) == 1);
    EXPECT(stx_writer_add(w, "empty", STX_F64, 3, zero, NULL) == 1);
    EXPECT(stx_writer_add(w, "deep", STX_F32, STX_ENTRY_DIM, ones, sample_f32 + 5) == 1);
    EXPECT(stx_writer_meta(w, "step", "12") == 1);
    EXPECT(stx_writer_meta(w, odd_name, odd_name) == 1);
    EXPECT(stx_writer_meta(w, "", "") == 1);
    EXPECT(stx_writer_finish(w, path) == 1);
    FINE();
}

static void check_samples(const stx_file *f) {
    float out32[6];
    double out64[6];
    int64_t outi[3];
    const stx_entry *e = stx_file_entry(f, 0);
    EXPECT(e && !strcmp(e->name, "bytes") && e->dtype == STX_U8 && e->bytes == 3
           && !memcmp(e->data, sample_u8, 3));
    EXPECT(stx_entry_get_i64(e, outi, 3) && outi[0] == 0 && outi[1] == 10 && outi[2] == 255);
    e = stx_file_entry(f, 1);
    EXPECT(e && !strcmp(e->name, "layer.0.w") && e == stx_file_find(f, "layer.0.w"));
    EXPECT(e && e->ndim == 2 && e->dim[0] == 2 && e->dim[1] == 3 && e->count == 6
           && e->bytes == 24);
    EXPECT(stx_entry_get_f32(e, out32, 6) && !memcmp(out32, sample_f32, sizeof sample_f32));
    EXPECT(stx_entry_get_f64(e, out64, 6) && out64[1] == -2 && out64[4] == (double)sample_f32[4]);
    e = stx_file_find(f, "f64");
    EXPECT(stx_entry_get_f64(e, out64, 2) && !memcmp(out64, sample_f64, sizeof sample_f64));
    e = stx_file_find(f, "bf16");
    EXPECT(stx_entry_get_f32(e, out32, 3) && out32[0] == 1 && out32[1] == -3 && out32[2] > 3e38f);
    EXPECT(stx_entry_get_f64(e, out64, 3) && out64[0] == 1 && out64[1] == -3 && out64[2] > 1e300);
    e = stx_file_find(f, odd_name);
    EXPECT(stx_entry_get_i64(e, outi, 2) && outi[0] == -5 && outi[1] == 2147483647);
    e = stx_file_find(f, "i64");
    EXPECT(stx_entry_get_i64(e, outi, 2) && outi[0] == INT64_MIN && outi[1] == 77);
    e = stx_file_find(f, "scalar");
    EXPECT(e && e->ndim == 0 && e->count == 1 && stx_entry_get_f32(e, out32, 1)
           && out32[0] == 1.5f);
    e = stx_file_find(f, "empty");
    EXPECT(e && e->ndim == 3 && e->dim[0] == 4 && e->dim[1] == 0 && e->count == 0 && e->bytes == 0);
    EXPECT(stx_entry_get_f64(e, NULL, 0) == 1);
    e = stx_file_find(f, "deep");
    EXPECT(e && e->ndim == STX_ENTRY_DIM && stx_entry_get_f32(e, out32, 1) && out32[0] == 7);
}

static void check_wrong_reads(const stx_file *f) {
    float out32[6];
    int64_t outi[3];
    const stx_entry *e = stx_file_find(f, "f64");
    EXPECT(!stx_entry_get_f32(e, out32, 3));
    ERROR(STX_ERR_ARG, "has 2 elements, but 3 were requested");
    EXPECT(!stx_entry_get_f32(e, NULL, 2));
    ERROR(STX_ERR_ARG, "round.safetensors");
    EXPECT(!stx_entry_get_i64(e, outi, 2));
    ERROR(STX_ERR_FORMAT, "expected an integer type or BOOL, got F64");
    EXPECT(!stx_entry_get_f32(NULL, out32, 1) && stx_ok(x));
}

static void test_round_trip(void) {
    const char *path = in_dir("round.safetensors"), *bytes;
    stx_file *f;
    size_t i;
    write_samples(path);
    f = stx_file_open(x, path);
    FINE();
    EXPECT(stx_file_count(f) == 9);
    EXPECT(stx_file_entry(f, 9) == NULL);
    EXPECT(stx_file_find(f, "missing") == NULL && stx_ok(x));
    EXPECT(stx_file_meta(f, "missing") == NULL && stx_ok(x));
    EXPECT(stx_file_meta(f, "step") && !strcmp(stx_file_meta(f, "step"), "12"));
    EXPECT(stx_file_meta(f, odd_name) && !strcmp(stx_file_meta(f, odd_name), odd_name));
    EXPECT(stx_file_meta(f, "") && !strcmp(stx_file_meta(f, ""), ""));
    check_samples(f);
    for (i = 0; i < stx_file_count(f); i++) { /* each tensor must be aligned to its element size */
        const stx_entry *e = stx_file_entry(f, i);
        EXPECT((uintptr_t)e->data % stx_dtype_size(e->dtype) == 0);
    }
    FINE();
    check_wrong_reads(f);
    stx_file_close(f);
    bytes = get_file(path, &i);
    EXPECT(i > 16 && bytes[8] == '{' && bytes[0] % 8 == 0);
}

static void test_no_tensors(void) {
    const char *path = in_dir("none.safetensors");
    stx_writer *w = stx_writer_create(x); /* neither tensors nor metadata */
    stx_file *f;
    EXPECT(stx_writer_finish(w, path) == 1);
    f = stx_file_open(x, path);
    EXPECT(f && stx_file_count(f) == 0 && stx_file_meta(f, "a") == NULL);
    stx_file_close(f);
    w = stx_writer_create(x); /* metadata without tensors */
    EXPECT(stx_writer_meta(w, "k", "v") && stx_writer_finish(w, path) == 1);
    f = stx_file_open(x, path);
    EXPECT(f && stx_file_count(f) == 0 && stx_file_meta(f, "k")
           && !strcmp(stx_file_meta(f, "k"), "v"));
    stx_file_close(f);
    FINE();
}

static void test_many(void) {
    enum { N = 600 };

    float *v = (float *)malloc(N * sizeof *v);
    char name[32];
    size_t one[1] = {1}, i, wrong = 0;
    stx_writer *w = stx_writer_create(x);
    stx_file *f;
    if (!v) return;
    for (i = 0; i < N; i++) {
        v[i] = (float)i;
        snprintf(name, sizeof name, "t.%u", (unsigned)(i * 7919 % N));
        wrong += !stx_writer_add(w, name, STX_F32, 1, one, v + i);
    }
    EXPECT(stx_writer_finish(w, in_dir("many")) == 1);
    f = stx_file_open(x, in_dir("many"));
    EXPECT(stx_file_count(f) == N);
    for (i = 0; i < N; i++) {
        float got = -1;
        snprintf(name, sizeof name, "t.%u", (unsigned)(i * 7919 % N));
        wrong += !(stx_entry_get_f32(stx_file_find(f, name), &got, 1) && got == (float)i);
        wrong += stx_file_entry(f, i) != stx_file_find(f, name);
    }
    EXPECT(wrong == 0);
    FINE();
    stx_file_close(f);
    free(v);
}


// >>safetensors: malformed files

static const char *put_header(const char *header, size_t len, size_t ndata) {
    unsigned char *b = (unsigned char *)calloc(1, 8 + len + ndata);
    const char *path;
    size_t i;
    for (i = 0; i < 8; i++) b[i] = (unsigned char)((uint64_t)len >> (8 * i) & 0xFF);
    memcpy(b + 8, header, len);
    path = put_bytes("bad", b, 8 + len + ndata);
    free(b);
    return path;
}

#define TWO_F32 "{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}"

static const struct {
    const char *header;
    size_t bytes, entries; /* bytes: size of the data; entries: number of tensors */
} good_headers[] = {
    {"{}", 0, 0},
    {"{\"a\":" TWO_F32 "}", 8, 1},
    {"{ \"a\" : { \"shape\" : [ 2 ] , \"data_offsets\" : [ 0 , 8 ] ,\n"
     "\t\r\"dtype\":\"F32\" } } \n ",
     8, 1},
    {"{\"a\":" TWO_F32 ",\"b\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[8,8]}}", 8, 2},
    {"{\"b\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[8,11]},\"a\":" TWO_F32 "}", 11, 2},
    {"{\"\\u0041\\ud83d\\ude00\\n\":" TWO_F32 "}", 8, 1},
    {"{\"__metadata__\":{},\"a\":" TWO_F32 "}", 8, 1},
    {"{\"a\":" TWO_F32 ",\"__metadata__\":{\"k\":\"v\"}}", 8, 1}};

static const struct {
    const char *header;
    size_t bytes;     /* size of the data */
    const char *part; /* part of the error text */
} bad_headers[] = {
    {"", 0, "'{'"},
    {" {}", 0, "'{'"},
    {"[]", 0, "'{'"},
    {"{", 0, "its header ends after"},
    {"{}x", 0, "only white space"},
    {"{}{}", 0, "only white space"},
    {"{,}", 0, "a string"},
    {"{\"a\":" TWO_F32 ",}", 8, "a string"},
    {"{\"a\":" TWO_F32 " \"b\":" TWO_F32 "}", 8, "','"},
    {"{\"a\" " TWO_F32 "}", 8, "':'"},
    {"{a:" TWO_F32 "}", 8, "a string"},
    {"{\"a\":[]}", 0, "'{'"},
    {"{\"a\":null}", 0, "'{'"},
    {"{\"a\":{}}", 0, "dtype, shape and data_offsets"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8, "dtype, shape and data_offsets"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"x\":1}}",
     8, "dtype, shape or data_offsets"},
    {"{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}",
     8, "each once"},
    {"{\"a\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "requires 4 bytes"},
    {"{\"a\":{\"dtype\":\"BOOL\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "requires 2 bytes"},
    {"{\"a\":{\"dtype\":\"U64\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "requires 16 bytes"},
    {"{\"a\":{\"dtype\":\"F4\",\"shape\":[4],\"data_offsets\":[0,8]}}", 8, "requires 2 bytes"},
    {"{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,2]}}", 2, "fill whole bytes"},
    {"{\"a\":{\"dtype\":\"F6_E3M2\",\"shape\":[9],\"data_offsets\":[0,7]}}",
     7, "has 9 elements of 6 bits"},
    {"{\"a\":{\"dtype\":\"F6_E2M3\",\"shape\":[8],\"data_offsets\":[0,8]}}",
     8, "requires 6 bytes"},
    {"{\"a\":{\"dtype\":\"F8_E8M0\",\"shape\":[8],\"data_offsets\":[0,4]}}",
     4, "requires 8 bytes"},
    {"{\"a\":{\"dtype\":\"NEW\",\"shape\":[2],\"data_offsets\":[0,48]}}", 48, "is damaged"},
    {"{\"a\":{\"dtype\":\"NEW\",\"shape\":[64],\"data_offsets\":[0,7]}}", 7, "is damaged"},
    {"{\"a\":{\"dtype\":\"NEW\",\"shape\":[0],\"data_offsets\":[0,1]}}", 1, "is damaged"},
    {"{\"a\":{\"dtype\":\"NEW\",\"shape\":[1],\"data_offsets\":[0,0]}}", 0, "is damaged"},
    {"{\"a\":{\"dtype\":\"NEW\",\"shape\":[18446744073709551615],\"data_offsets\":[0,8]}}",
     8, "overflows"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4294967296,1,1,1,4294967296],\"data_offsets\":[0,8]}}",
     8, "overflows"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4294967296,1,1,1,4294967296,0],\"data_offsets\":[0,0]}}",
     0, "overflows"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,3],\"data_offsets\":[0,8]}}",
     8, "requires 12 bytes"},
    {"{\"a\":{\"dtype\":4,\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "a string"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":2,\"data_offsets\":[0,8]}}", 8, "'['"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2,],\"data_offsets\":[0,8]}}",
     8, "non-negative integer"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,8]}}",
     8, "non-negative integer"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[+2],\"data_offsets\":[0,8]}}",
     8, "non-negative integer"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[02],\"data_offsets\":[0,8]}}", 8, "','"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2.0],\"data_offsets\":[0,8]}}", 8, "','"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2e0],\"data_offsets\":[0,8]}}", 8, "','"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[\"2\"],\"data_offsets\":[0,8]}}",
     8, "non-negative integer"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[[2]],\"data_offsets\":[0,8]}}",
     8, "non-negative integer"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[99999999999999999999],\"data_offsets\":[0,8]}}",
     8, "fits in a size_t"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[18446744073709551616],\"data_offsets\":[0,8]}}",
     8, "fits in a size_t"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[18446744073709551615],\"data_offsets\":[0,8]}}",
     8, "overflows"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}",
     0, "overflows"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1073741824,4294967297],\"data_offsets\":[0,0]}}",
     0, "overflows"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,8]}}", 8, "requires 12 bytes"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,8]}}", 8, "requires 4 bytes"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,0]}}", 8, "bytes 8 to 0"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0]}}", 8, "','"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8,9]}}", 8, "']'"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 7, "truncated"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 9, "has 9 bytes"},
    {"{}", 1, "has 1 bytes"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}", 12, "gap"},
    {"{\"a\":" TWO_F32 ",\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
     8, "inside another tensor"},
    {"{\"a\":" TWO_F32 ",\"b\":" TWO_F32 "}", 8, "inside another tensor"},
    {"{\"a\":" TWO_F32 ",\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[12,16]}}",
     16, "gap"},
    {"{\"a\":" TWO_F32 ",\"b\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[4,4]}}",
     8, "inside another tensor"},
    {"{\"a\":" TWO_F32 ",\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[8,12]}}",
     12, "two tensors named \"a\""},
    {"{\"a\":" TWO_F32 ",\"\\u0061\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[8,12]}}",
     12, "two tensors named \"a\""},
    {"{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}", 0, "two values for \"k\""},
    {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "only one __metadata__"},
    {"{\"__metadata__\":{\"k\":1}}", 0, "a string"},
    {"{\"__metadata__\":{\"k\":{\"n\":\"v\"}}}", 0, "a string"},
    {"{\"__metadata__\":[]}", 0, "'{'"},
    {"{\"a", 0, "closing quote"},
    {"{\"a\\", 0, "its header ends after"},
    {"{\"a\\q\":" TWO_F32 "}", 8, "after a backslash"},
    {"{\"a\\u12\":" TWO_F32 "}", 8, "four hexadecimal digits"},
    {"{\"a\\u12", 0, "four hexadecimal digits"},
    {"{\"a\\u0000\":" TWO_F32 "}", 8, "Unicode character"},
    {"{\"a\\ud83d\":" TWO_F32 "}", 8, "Unicode character"},
    {"{\"a\\ude00\":" TWO_F32 "}", 8, "Unicode character"},
    {"{\"a\\ud83d\\u0041\":" TWO_F32 "}", 8, "surrogate pair"},
    {"{\"a\n\":" TWO_F32 "}", 8, "UTF-8 text"},
    {"{\"a\xFF\":" TWO_F32 "}", 8, "UTF-8 text"},
    {"{\"a\xC0\x80\":" TWO_F32 "}", 8, "UTF-8 text"},
    {"{\"a\xED\xA0\x80\":" TWO_F32 "}", 8, "UTF-8 text"},
    {"{\"a\xF4\x90\x80\x80\":" TWO_F32 "}", 8, "UTF-8 text"},
    {"{\"a\xE2\x82\":" TWO_F32 "}", 8, "UTF-8 text"}};

static void good_header(const char *header, size_t bytes, size_t entries) {
    stx_file *f = stx_file_open(x, put_header(header, strlen(header), bytes));
    if (!EXPECT(f && stx_file_count(f) == entries))
        printf("  refused: %s: %s\n", header, stx_error(x));
    stx_file_close(f);
    stx_clear_error(x);
}

static void bad_header(const char *header, size_t bytes, const char *part) {
    stx_file *f = stx_file_open(x, put_header(header, strlen(header), bytes));
    if (!EXPECT(!f)) {
        printf("  accepted: %s\n", header);
        stx_file_close(f);
        return;
    }
    if (!ERROR(STX_ERR_FORMAT, part)) printf("  header: %s\n", header);
}

static void test_headers(void) {
    static const char escapes[] =
        "{\"\\u001b[2J\":{\"dtype\":\"\\u001b\",\"shape\":[2],\"data_offsets\":[0,8]}}";
    stx_file *f;
    size_t i;
    for (i = 0; i < sizeof good_headers / sizeof *good_headers; i++)
        good_header(good_headers[i].header, good_headers[i].bytes, good_headers[i].entries);
    for (i = 0; i < sizeof bad_headers / sizeof *bad_headers; i++)
        bad_header(bad_headers[i].header, bad_headers[i].bytes, bad_headers[i].part);

    /* Zero bytes inside the header and after it must be refused. */
    f = stx_file_open(x, put_header("{\0}", 3, 0));
    EXPECT(f == NULL);
    ERROR(STX_ERR_FORMAT, "\\x00");
    f = stx_file_open(x, put_header("{}\0", 3, 0));
    EXPECT(f == NULL);
    ERROR(STX_ERR_FORMAT, "only white space");

    /* Control characters in the names of a hostile file must not reach the terminal. */
    good_header(escapes, 8, 1);
    f = stx_file_open(x, put_header(escapes, strlen(escapes), 8));
    EXPECT(!stx_entry_get_f32(stx_file_entry(f, 0), NULL, 2) && strchr(stx_error(x), 27) == NULL);
    ERROR(STX_ERR_FORMAT, "\"\\x1B[2J\": dtype \"\\x1B\" is not supported");
    stx_file_close(f);
}

/* Invalid length fields must be refused: incomplete, beyond the file, beyond the limit,
   all ones. */
static void test_lengths(void) {
    unsigned char b[64];
    size_t i;
    for (i = 0; i < 8; i++) {
        EXPECT(stx_file_open(x, put_bytes("bad", "\2\0\0\0\0\0\0\0", i)) == NULL);
        ERROR(STX_ERR_FORMAT, "at least 10 bytes");
    }
    memset(b, 0, sizeof b);
    memcpy(b + 8, "{}", 2);
    b[0] = 3;
    EXPECT(stx_file_open(x, put_bytes("bad", b, 10)) == NULL);
    ERROR(STX_ERR_FORMAT, "a header of 3 bytes, but the file has 10");
    b[3] = 0x7F;
    EXPECT(stx_file_open(x, put_bytes("bad", b, 10)) == NULL);
    ERROR(STX_ERR_FORMAT, "the limit for a header is 100000000");
    memset(b, 0xFF, 8);
    EXPECT(stx_file_open(x, put_bytes("bad", b, 10)) == NULL);
    ERROR(STX_ERR_FORMAT, "18446744073709551615");
}

static void test_open_errors(void) {
    EXPECT(stx_file_open(x, in_dir("nothing here")) == NULL);
    ERROR(STX_ERR_IO, "nothing here: No such file");
    EXPECT(stx_file_open(x, dir) == NULL);
    ERROR(STX_ERR_IO, "directory");
    EXPECT(stx_file_open(x, NULL) == NULL);
    ERROR(STX_ERR_ARG, "NULL");
    EXPECT(stx_file_open(NULL, "a") == NULL);
#ifndef SEQTX_STDIO_FILES
    EXPECT(mkfifo(in_dir("fifo"), 0600) == 0);
    EXPECT(stx_file_open(x, in_dir("fifo")) == NULL);
    ERROR(STX_ERR_IO, "not a regular file");
#endif
    /* After an error, calls must do nothing, and the first error must be kept. */
    stx_fail(x, STX_ERR_ARG, "first");
    EXPECT(stx_file_open(x, in_dir("round.safetensors")) == NULL);
    ERROR(STX_ERR_ARG, "first");
    EXPECT(stx_file_count(NULL) == 0 && !stx_file_entry(NULL, 0) && !stx_file_find(NULL, "a")
           && !stx_file_meta(NULL, "a"));
    stx_file_close(NULL);
}

/* A tensor that the library cannot read must not prevent reading the others. */
static void test_dtypes(void) {
    static const char *const kinds[][2] = {
        {"C64", "[]"},       {"F4", "[16]"},   {"F6_E2M3", "[8]"},         {"F8_E8M0", "[8]"},
        {"a new one", "[3]"}, {"I16", "[4,1,1,1,1,1,1,1,1]"}, {"F64", "[1,1,1,1,1,1,1,1,1,1]"}};
    char header[400];
    float v[2];
    double d[16];
    int64_t n[16];
    size_t k;
    stx_file *file;
    const stx_entry *e;
    stx_params *p;
    for (k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        const int many = strlen(kinds[k][1]) > 16, bytes = strcmp(kinds[k][0], "F6_E2M3") ? 8 : 6;
        const char *part = many ? "at most 8 dimensions" : kinds[k][0];
        snprintf(header, sizeof header,
                 "{\"other\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[0,%d]},"
                 "\"w\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[%d,%d]}}",
                 kinds[k][0], kinds[k][1], bytes, bytes, bytes + 8);
        file = stx_file_open(x, put_header(header, strlen(header), (size_t)bytes + 8));
        e = stx_file_find(file, "other");
        EXPECT(stx_file_count(file) == 2 && e && (int)e->bytes == bytes);
        EXPECT(e && e->dtype == (strcmp(kinds[k][0], "C64") ? STX_OTHER : STX_C64));
        EXPECT(e && !strcmp(e->kind, kinds[k][0]));
        EXPECT(e && (many ? e->ndim == 0 && e->dims > STX_ENTRY_DIM : e->ndim == (int)e->dims));
        EXPECT(stx_entry_get_f32(stx_file_find(file, "w"), v, 2) && v[0] == 0);
        FINE();
        EXPECT(e && !stx_entry_get_f32(e, v, e->count));
        ERROR(STX_ERR_FORMAT, part);
        EXPECT(e && !stx_entry_get_f64(e, d, e->count));
        ERROR(STX_ERR_FORMAT, part);
        EXPECT(e && !stx_entry_get_i64(e, n, e->count));
        ERROR(STX_ERR_FORMAT, part);
        p = stx_params_create(x);
        stx_param(p, STX_ZEROS, 0, "other", 2, 4, 0, 0);
        EXPECT(!stx_params_load(p, file, ""));
        ERROR(STX_ERR_FORMAT, "\"other\"");
        stx_file_close(file);
    }
}

/* Returns the entry whose name is `name` followed by `suffix`. */
static const stx_entry *suffixed(const stx_file *f, const char *name, const char *suffix) {
    char full[64];
    snprintf(full, sizeof full, "%s%s", name, suffix);
    return stx_file_find(f, full);
}

static int same_value(double a, double b) {
    return a == b ? !signbit(a) == !signbit(b) : isnan(a) && isnan(b);
}

/* Compares the elements of one entry with the values that another program stored next to
   it. Returns the number of elements, or 0 if they differ. */
static size_t check_values(const stx_file *f, const stx_entry *e) {
    const stx_entry *f32 = suffixed(f, e->name, ".f32"), *f64 = suffixed(f, e->name, ".f64");
    const size_t n = e->count;
    double *v = (double *)malloc(n * sizeof *v), *all = (double *)malloc(n * sizeof *all);
    double *rounded = (double *)malloc(n * sizeof *rounded);
    float *single = (float *)malloc(n * sizeof *single);
    size_t i;
    int ok = stx_entry_get_f64(f64, all, n) && stx_entry_get_f64(f32 ? f32 : f64, rounded, n);
    ok = ok && stx_entry_get_f64(e, v, n) && stx_entry_get_f32(e, single, n);
    for (i = 0; ok && i < n; i++)
        ok = same_value(v[i], all[i]) && same_value((double)single[i], rounded[i]);
    if (!ok) printf("  %s: element %zu differs, or %s\n", e->name, i - (i > 0), stx_error(x));
    free(v);
    free(all);
    free(rounded);
    free(single);
    return ok ? n : 0;
}

/* Every type of the format, in a file that tests/golden/make_golden_types.py packed. */
static void test_types(void) {
    static const struct {
        const char *name;
        int dtype;
        size_t count;
    } all[] = {{"F32", STX_F32, 1024},        {"F16", STX_F16, 1024}, {"BF16", STX_BF16, 1024},
               {"F8_E4M3", STX_F8_E4M3, 256}, {"I8", STX_I8, 10},     {"U8", STX_U8, 6},
               {"F8_E5M2", STX_F8_E5M2, 256}, {"I16", STX_I16, 10},   {"U16", STX_U16, 6},
               {"BOOL", STX_BOOL, 5},         {"I32", STX_I32, 26},   {"U32", STX_U32, 19},
               {"I64", STX_I64, 66},          {"U64", STX_U64, 41}};
    static const char *const listed[] = {"C64",         "F8_E8M0", "F8_E4M3FNUZ",
                                         "F8_E5M2FNUZ", "F6_E2M3", "F6_E3M2", "F4"};
    static const size_t dims[STX_ENTRY_DIM] = {1, 2, 1, 3, 1, 1, 2, 1};
    stx_file *f = stx_file_open(x, "tests/golden/types.safetensors");
    const stx_entry *e;
    float v[12];
    size_t i;
    FINE();
    for (i = 0; f && i < sizeof all / sizeof *all; i++) {
        e = stx_file_find(f, all[i].name);
        if (EXPECT(e && e->dtype == all[i].dtype && !strcmp(e->kind, all[i].name)))
            EXPECT(e->count == all[i].count && check_values(f, e) == e->count);
        FINE();
    }
    for (i = 0; f && i < sizeof listed / sizeof *listed; i++) {
        e = stx_file_find(f, listed[i]);
        EXPECT(e && !strcmp(e->kind, listed[i]) && e->dtype == (i ? STX_OTHER : STX_C64));
    }
    e = stx_file_find(f, "d8");
    EXPECT(e && e->dtype == STX_F32 && e->ndim == 8 && !memcmp(e->dim, dims, sizeof dims));
    EXPECT(stx_entry_get_f32(e, v, 12) && v[0] == 0 && v[11] == 11);
    e = stx_file_find(f, "d9");
    EXPECT(e && e->dtype == STX_OTHER && !e->ndim && e->dims == 9 && e->bytes == 48);
    stx_file_close(f);
}

/* The integer types as int64_t, written and read. A U64 above 2^63 - 1 is refused. */
static void test_integers(void) {
    static const uint64_t big[2] = {INT64_MAX, (uint64_t)INT64_MAX + 1};
    static const unsigned char b[8] = {0xFF, 0xFF, 0xFF, 0xFF, 0x7F, 0x80, 0, 1};
    static const struct {
        int dtype;
        size_t n;
        int64_t v[8];
    } rows[] = {{STX_I8, 8, {-1, -1, -1, -1, 127, -128, 0, 1}},
                {STX_U8, 8, {255, 255, 255, 255, 127, 128, 0, 1}},
                {STX_BOOL, 8, {1, 1, 1, 1, 1, 1, 0, 1}},
                {STX_I16, 4, {-1, -1, -32641, 256}},
                {STX_U16, 4, {65535, 65535, 32895, 256}},
                {STX_I32, 2, {-1, 0x0100807F}},
                {STX_U32, 2, {0xFFFFFFFF, 0x0100807F}},
                {STX_I64, 1, {0x0100807FFFFFFFFF}},
                {STX_U64, 1, {0x0100807FFFFFFFFF}}};
    const size_t all = sizeof rows / sizeof *rows, two = 2;
    char name[16];
    int64_t v[8] = {5, 5};
    size_t i;
    stx_writer *w = stx_writer_create(x);
    stx_file *f;
    for (i = 0; i < all; i++) {
        snprintf(name, sizeof name, "%zu", i);
        EXPECT(stx_writer_add(w, name, rows[i].dtype, 1, &rows[i].n, b));
    }
    EXPECT(stx_writer_add(w, "big", STX_U64, 1, &two, big) && stx_writer_checksum(w));
    EXPECT(stx_writer_finish(w, in_dir("integers")));
    f = stx_file_open(x, in_dir("integers"));
    EXPECT(stx_file_verify(f));
    for (i = 0; i < all; i++) {
        const stx_entry *e = stx_file_entry(f, i);
        EXPECT(e && e->dtype == rows[i].dtype && stx_entry_get_i64(e, v, rows[i].n)
               && !memcmp(v, rows[i].v, rows[i].n * sizeof *v));
    }
    v[0] = v[1] = 5;
    EXPECT(!stx_entry_get_i64(stx_file_find(f, "big"), v, 2) && v[0] == 5 && v[1] == 5);
    ERROR(STX_ERR_FORMAT, "at most 2^63 - 1, got 9223372036854775808 at index 1");
    stx_file_close(f);
    FINE();
}

/* Parameters are loaded from F32, F64, F16 and BF16, in their own shape only. */
static void test_params_types(void) {
    static const unsigned char zeros[96];
    static const size_t d[STX_ENTRY_DIM] = {2, 3, 1, 1, 1, 1, 1, 2}, d23[2] = {2, 3};
    stx_params *p = stx_params_create(x);
    int dtype;
    stx_param(p, STX_ZEROS, 0, "w", 2, 3, 0, 0);
    for (dtype = STX_F32; dtype <= STX_F8_E5M2; dtype++) {
        const int good = dtype <= STX_BF16 || dtype == STX_F16;
        stx_writer *w = stx_writer_create(x);
        stx_file *f;
        EXPECT(stx_writer_add(w, "w", dtype, 2, d23, zeros) && stx_writer_finish(w, in_dir("w")));
        f = stx_file_open(x, in_dir("w"));
        EXPECT(stx_params_load(p, f, "") == good);
        if (good) FINE();
        else ERROR(STX_ERR_FORMAT, stx_file_entry(f, 0)->kind);
        stx_file_close(f);
        w = stx_writer_create(x);
        EXPECT(stx_writer_add(w, "w", dtype, 8, d, zeros) && stx_writer_finish(w, in_dir("w")));
        f = stx_file_open(x, in_dir("w"));
        EXPECT(!stx_params_load(p, f, ""));
        ERROR(STX_ERR_FORMAT, dtype == STX_C64 ? "C64" : "has shape (2,3,1,1,1,1,1,2)");
        stx_file_close(f);
    }
}

/* Creates parameters of a model with V tokens, whose elements have the deviation a. */
static stx_params *tokens_of(stx_ctx *y, size_t V, double a) {
    stx_params *p = stx_params_create(y);
    stx_param(p, STX_NORMAL, a, "in_emb.weight", V, 3, 0, 0);
    stx_param(p, STX_NORMAL, a, "layer.weight", 4, 3, 0, 0);
    stx_param(p, STX_NORMAL, a, "out_emb.bias", V, 0, 0, 0);
    return p;
}

/* The rows of a smaller model are loaded bit for bit. The others, and everything after an
   error, stay as they were. */
static void test_params_grown(void) {
    static const size_t more[] = {2, 0, 1, 3, SIZE_MAX};
    stx_ctx *y = stx_create(NULL), *z = stx_create(NULL);
    stx_params *p = tokens_of(y, 5, 1), *q = tokens_of(z, 7, 2);
    stx_real was[7 * 3 + 4 * 3 + 7];
    stx_writer *w = stx_writer_create(y);
    stx_file *f;
    size_t i, k, at, rows;
    int same;
    EXPECT(stx_params_save(w, p, "m.") && stx_writer_finish(w, in_dir("small")));
    f = stx_file_open(z, in_dir("small"));
    for (k = sizeof more / sizeof *more; k-- > 0;) {
        for (at = i = 0; i < q->count; at += q->tensor[i++]->size)
            memcpy(was + at, q->tensor[i]->data, q->tensor[i]->size * sizeof *was);
        EXPECT(stx_params_load_grown(q, f, "m.", more[k]) == (more[k] == 2));
        if (more[k] != 2)
            EXPECT(strstr(stx_error(z), "expects shape (7,3)") && strstr(stx_error(z), "(5,3)"));
        for (same = 1, at = i = 0; i < q->count; at += q->tensor[i++]->size) {
            const stx_real *now = q->tensor[i]->data;
            rows = more[k] == 2 ? p->tensor[i]->size : 0;
            same &= !memcmp(now, p->tensor[i]->data, rows * sizeof *now);
            same &= !memcmp(now + rows, was + at + rows,
                            (q->tensor[i]->size - rows) * sizeof *now);
        }
        EXPECT(same && stx_ok(z) == (more[k] == 2));
        stx_clear_error(z);
    }
    EXPECT(!stx_params_load_grown(NULL, f, "m.", 2) && !stx_params_load_grown(q, NULL, "m.", 2));
    stx_file_close(f);
    stx_destroy(y);
    stx_destroy(z);
}

/* A file truncated at any byte must be refused. No flipped bit may cause a crash. */
static void test_damaged(void) {
    float v[4] = {1, 2, 3, 4};
    size_t d[2] = {2, 2}, n, i;
    char *bytes;
    stx_writer *w = stx_writer_create(x);
    const char *path = in_dir("whole");
    stx_writer_add(w, "weight", STX_F32, 2, d, v);
    stx_writer_add(w, "b\xC3\xBCtes\n", STX_U8, 2, d, v);
    stx_writer_meta(w, "step", "100");
    EXPECT(stx_writer_finish(w, path) == 1);
    bytes = get_file(path, &n);
    for (i = 0; i <= n; i++) {
        stx_file *f = stx_file_open(x, put_bytes("cut", bytes, i));
        EXPECT((f != NULL) == (i == n));
        EXPECT(stx_ok(x) == (i == n));
        stx_file_close(f);
        stx_clear_error(x);
    }
    for (i = 0; i < n - 20; i++) {
        int bit;
        for (bit = 0; bit < 8; bit++) {
            stx_file *f;
            bytes[i] = (char)(bytes[i] ^ 1 << bit);
            f = stx_file_open(x, put_bytes("cut", bytes, n));
            EXPECT((f != NULL) == (stx_ok(x) != 0));
            stx_file_close(f);
            stx_clear_error(x);
            bytes[i] = (char)(bytes[i] ^ 1 << bit);
        }
    }
}


// >>writing

/* Writes a file with one tensor, named "v", of n elements that all have the value v. */
static int save(const char *path, float v, size_t n) {
    float *p = (float *)malloc((n + 1) * sizeof *p);
    size_t i, d[1];
    stx_writer *w = stx_writer_create(x);
    int done;
    for (i = 0; p && i < n; i++) p[i] = v;
    d[0] = n;
    stx_writer_add(w, "v", STX_F32, 1, d, p);
    done = stx_writer_finish(w, path);
    free(p);
    return done;
}

/* Returns the value that save wrote, or NaN if the file is incomplete. *n receives the
   number of elements. */
static float saved(const char *path, size_t *n) {
    stx_file *f = stx_file_open(x, path);
    const stx_entry *e = stx_file_find(f, "v");
    float *p = (float *)malloc(e ? e->bytes + 1 : 1), v = (float)NAN;
    size_t i;
    if (e && p && stx_entry_get_f32(e, p, e->count) && e->count) {
        v = p[0];
        for (i = 0; i < e->count; i++)
            if (p[i] != v) {
                v = (float)NAN;
                break;
            }
        if (n) *n = e->count;
    }
    free(p);
    stx_file_close(f);
    return v;
}

static void test_add_errors(void) {
    float v[4] = {0, 0, 0, 0};
    size_t d[2] = {2, 2}, huge[2];
    stx_writer *w = stx_writer_create(x);
    huge[0] = huge[1] = (size_t)1 << (sizeof(size_t) * 4);
    EXPECT(!stx_writer_add(w, "", STX_F32, 2, d, v));
    ERROR(STX_ERR_ARG, "is not a valid tensor name");
    EXPECT(!stx_writer_add(w, NULL, STX_F32, 2, d, v));
    ERROR(STX_ERR_ARG, "NULL");
    EXPECT(!stx_writer_add(w, "__metadata__", STX_F32, 2, d, v));
    ERROR(STX_ERR_ARG, "__metadata__");
    EXPECT(!stx_writer_add(w, "a\xFF", STX_F32, 2, d, v));
    ERROR(STX_ERR_ARG, "a\\xFF");
    EXPECT(!stx_writer_add(w, "a", STX_F8_E5M2 + 1, 2, d, v));
    ERROR(STX_ERR_ARG, "dtype 16");
    EXPECT(!stx_writer_add(w, "a", -1, 2, d, v));
    ERROR(STX_ERR_ARG, "dtype -1");
    EXPECT(!stx_writer_add(w, "a", STX_F32, -1, d, v));
    ERROR(STX_ERR_ARG, "-1 dimensions");
    EXPECT(!stx_writer_add(w, "a", STX_F32, STX_ENTRY_DIM + 1, d, v));
    ERROR(STX_ERR_ARG, "0 to 8 dimensions");
    EXPECT(!stx_writer_add(w, "a", STX_F32, 2, NULL, v));
    ERROR(STX_ERR_ARG, "dim = NULL");
    EXPECT(!stx_writer_add(w, "a", STX_F32, 2, d, NULL));
    ERROR(STX_ERR_ARG, "expected 16 bytes of data, got NULL");
    EXPECT(!stx_writer_add(w, "a", STX_F32, 2, huge, v));
    ERROR(STX_ERR_ARG, "overflows");
    EXPECT(stx_writer_add(w, "a", STX_F32, 2, d, v));
    EXPECT(!stx_writer_add(w, "a", STX_F32, 2, d, v));
    ERROR(STX_ERR_ARG, "\"a\" was added twice");
    EXPECT(!stx_writer_meta(w, "k", "\xC3"));
    ERROR(STX_ERR_ARG, "not UTF-8");
    EXPECT(!stx_writer_meta(w, "k", NULL));
    ERROR(STX_ERR_ARG, "NULL");
    EXPECT(stx_writer_meta(w, "k", "v"));
    EXPECT(!stx_writer_meta(w, "k", "w"));
    ERROR(STX_ERR_ARG, "\"k\" was added twice");
    EXPECT(stx_writer_add(w, "b", STX_F32, 2, d, v));
    EXPECT(!stx_writer_finish(w, in_dir("incomplete")));
    ERROR(STX_ERR_ARG, "so nothing is written");
    EXPECT(access(in_dir("incomplete"), F_OK) != 0);
}

static void test_finish_errors(void) {
    float v[4] = {0, 0, 0, 0};
    size_t huge[1];
    stx_writer *w = stx_writer_create(x);
    huge[0] = (size_t)-1 / 8;
    EXPECT(stx_writer_add(w, "a", STX_F32, 1, huge, v)
           && stx_writer_add(w, "b", STX_F32, 1, huge, v));
    EXPECT(!stx_writer_finish(w, in_dir("incomplete")));
    ERROR(STX_ERR_ARG, "more bytes than a file can hold");
    EXPECT(!stx_writer_finish(stx_writer_create(x), NULL));
    ERROR(STX_ERR_ARG, "NULL");
    EXPECT(!save(in_dir("no/such/dir"), 1, 1));
    ERROR(STX_ERR_IO, "No such file");
    EXPECT(!stx_writer_finish(NULL, "a") && !stx_writer_add(NULL, "a", 0, 0, NULL, v)
           && !stx_writer_meta(NULL, "a", "b"));
    stx_writer_free(NULL);
    stx_writer_free(stx_writer_create(x));
    /* After an error, not even a complete writer may write anything. */
    w = stx_writer_create(x);
    stx_fail(x, STX_ERR_ARG, "first");
    EXPECT(!stx_writer_finish(w, in_dir("incomplete")));
    EXPECT(stx_writer_create(x) == NULL);
    ERROR(STX_ERR_ARG, "first");
    EXPECT(access(in_dir("incomplete"), F_OK) != 0);
}

static void test_replace(void) {
    const char *path = in_dir("r/file");
    size_t n = 0;
    EXPECT(mkdir(in_dir("r"), 0777) == 0 && mkdir(in_dir("s"), 0777) == 0);
    chmod(in_dir("r"), 0777);
    chmod(in_dir("s"), 0777);
    EXPECT(save(path, 1, 10));
    EXPECT(saved(path, &n) == 1 && n == 10);
    EXPECT(save(path, 2, 20));
    EXPECT(saved(path, &n) == 2 && n == 20);
    EXPECT(dir_entries(in_dir("r"), "tmp") == 0);
    FINE();
}

#ifndef SEQTX_STDIO_FILES
static void test_modes(void) {
    const char *path = in_dir("r/file");
    struct stat st;
    /* The mode of an existing file must be kept. */
    EXPECT(chmod(path, 0640) == 0);
    EXPECT(save(path, 3, 30));
    EXPECT(stat(path, &st) == 0 && (st.st_mode & 07777) == 0640);
    /* A new file must have the mode that the umask allows. */
    umask(027);
    EXPECT(save(in_dir("r/new"), 3, 30));
    EXPECT(stat(in_dir("r/new"), &st) == 0 && (st.st_mode & 07777) == 0640);
    umask(022);
}

/* Symbolic links must be followed, including relative, chained and dangling ones. */
static void test_links(void) {
    const char *path = in_dir("r/file");
    struct stat st;
    size_t n = 0;
    EXPECT(symlink("../r/file", in_dir("s/link")) == 0 && symlink("link", in_dir("s/link2")) == 0);
    EXPECT(save(in_dir("s/link2"), 4, 40));
    EXPECT(lstat(in_dir("s/link2"), &st) == 0 && S_ISLNK(st.st_mode));
    EXPECT(lstat(in_dir("s/link"), &st) == 0 && S_ISLNK(st.st_mode));
    EXPECT(lstat(path, &st) == 0 && S_ISREG(st.st_mode) && saved(path, &n) == 4 && n == 40);
    EXPECT(symlink(in_dir("r/later"), in_dir("s/dangling")) == 0);
    EXPECT(save(in_dir("s/dangling"), 5, 50));
    EXPECT(saved(in_dir("r/later"), NULL) == 5);
    EXPECT(symlink("circle", in_dir("s/circle")) == 0);
    EXPECT(!save(in_dir("s/circle"), 5, 50));
    ERROR(STX_ERR_IO, "symbolic links");
    EXPECT(dir_entries(in_dir("s"), "tmp") == 0 && dir_entries(in_dir("r"), "tmp") == 0);

    EXPECT(!save(dir, 1, 1));
    ERROR(STX_ERR_IO, "directory");
    EXPECT(!save("/dev/null", 1, 1));
    ERROR(STX_ERR_IO, "not a regular file");
    EXPECT(stat("/dev/null", &st) == 0 && S_ISCHR(st.st_mode));
    EXPECT(!save(in_dir("fifo"), 1, 1));
    ERROR(STX_ERR_IO, "not a regular file");
}

/* Starts a child that holds the lock of a temporary file until the child is killed. */
static pid_t lock_in_child(const char *path, int ready) {
    pid_t pid;
    fflush(stdout);
    pid = fork();
    if (pid == 0) {
        struct flock l;
        int fd = open(path, O_WRONLY);
        memset(&l, 0, sizeof l);
        l.l_type = F_WRLCK;
        if (fd < 0 || fcntl(fd, F_SETLK, &l) != 0) _exit(1);
        if (write(ready, "x", 1) != 1) _exit(2);
        for (;;) pause();
    }
    return pid;
}

/* Temporary files of killed processes must be removed. Temporary files of running
   processes, and files with similar names, must be kept. */
static void test_leftovers(void) {
    const char *path = in_dir("r/file");
    struct timespec old[2];
    struct stat st;
    char own[100], c;
    int status, ends[2], back;
    pid_t pid;
    /* a temporary file with the name that this process would choose */
    snprintf(own, sizeof own, "r/file.%ld.0.tmp", (long)getpid());
    put_text(own, "other");
    EXPECT(save(path, 6, 60) && saved(path, NULL) == 6);
    EXPECT(stat(in_dir(own), &st) == 0 && st.st_size == 5);
    EXPECT(unlink(in_dir(own)) == 0);

    put_text("r/file.1.0.tmp", "left by a killed process");
    put_text("r/file.999999999.12.tmp", "left by a killed process");
    put_text("r/file.77.0.tmp", "being written");
    snprintf(own, sizeof own, "r/file.%ld.7.tmp", (long)getpid());
    put_text(own, "recent, with the id of this process");
    put_text("r/file.1.tmp", "another name");
    put_text("r/file.1.0.tmp2", "another name");
    put_text("r/file.1.x.tmp", "another name");
    put_text("r/files.1.0.tmp", "for another target");
    EXPECT(pipe(ends) == 0);
    pid = lock_in_child(in_dir("r/file.77.0.tmp"), ends[1]);
    EXPECT(read(ends[0], &c, 1) == 1);
    EXPECT(save(path, 6, 60) && saved(path, NULL) == 6);
    EXPECT(access(in_dir("r/file.1.0.tmp"), F_OK) != 0
           && access(in_dir("r/file.999999999.12.tmp"), F_OK) != 0);
    EXPECT(access(in_dir("r/file.77.0.tmp"), F_OK) == 0 && access(in_dir(own), F_OK) == 0);
    EXPECT(kill(pid, SIGKILL) == 0 && waitpid(pid, &status, 0) == pid);
    close(ends[0]);
    close(ends[1]);
    /* A temporary file with the id of this process must be removed once it is an hour
       old. */
    memset(old, 0, sizeof old);
    old[0].tv_sec = old[1].tv_sec = time(NULL) - 3700;
    EXPECT(utimensat(AT_FDCWD, in_dir(own), old, 0) == 0);
    EXPECT(save(path, 6, 60));
    EXPECT(access(in_dir("r/file.77.0.tmp"), F_OK) != 0 && access(in_dir(own), F_OK) != 0);
    EXPECT(unlink(in_dir("r/file.1.tmp")) == 0 && unlink(in_dir("r/file.1.0.tmp2")) == 0
           && unlink(in_dir("r/file.1.x.tmp")) == 0);
    EXPECT(unlink(in_dir("r/files.1.0.tmp")) == 0);
    /* a target path without a directory */
    back = open(".", O_RDONLY);
    EXPECT(back >= 0 && chdir(in_dir("r")) == 0);
    put_text("r/here.5.0.tmp", "left by a killed process");
    EXPECT(save("here", 6, 60) && access("here.5.0.tmp", F_OK) != 0 && unlink("here") == 0);
    EXPECT(fchdir(back) == 0 && close(back) == 0);
}

/* A write-protected file must be refused. Root can write to any file, so a child
   process with another user id makes the attempt. */
static void test_protected(void) {
    const char *path = in_dir("r/file");
    int status;
    pid_t pid;
    EXPECT(chmod(path, 0444) == 0 && chmod(dir, 0755) == 0);
    fflush(stdout);
    pid = fork();
    if (pid == 0) {
        int ok;
        if (geteuid() == 0 && setuid(65534) != 0) _exit(2);
        ok = !save(path, 7, 70) && stx_error_code(x) == STX_ERR_IO
             && strstr(stx_error(x), "write-protected") != NULL;
        _exit(ok ? 0 : 1);
    }
    EXPECT(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    EXPECT(chmod(path, 0644) == 0);
    EXPECT(saved(path, NULL) == 6);
    FINE();
}

  #ifdef __linux__
/* The data must be on disk before the file is renamed. */
static void test_sync(void) {
    const char *path = in_dir("r/file");
    events[0] = 0;
    EXPECT(save(path, 8, 80));
    EXPECT(!strcmp(events, "FRD"));
    fail_fsync = EIO;
    EXPECT(!save(path, 9, 90));
    ERROR(STX_ERR_IO, "any existing file of this name is unchanged");
    fail_fsync = 0;
    EXPECT(saved(path, NULL) == 8 && dir_entries(in_dir("r"), "tmp") == 0);
    fail_rename = EACCES;
    EXPECT(!save(path, 9, 90));
    ERROR(STX_ERR_IO, "Permission denied");
    fail_rename = 0;
    EXPECT(saved(path, NULL) == 8 && dir_entries(in_dir("r"), "tmp") == 0);
    fail_dir = EIO;
    EXPECT(!save(path, 10, 90));
    ERROR(STX_ERR_IO, "directory");
    fail_dir = EINVAL; /* a file system that cannot flush a directory */
    EXPECT(save(path, 11, 90) && saved(path, NULL) == 11);
    fail_dir = 0;
    FINE();
}
  #endif

/* Names of any length, and names in UTF-8, must work. If a file's name has the maximum
   length, the temporary file's name must be shortened. */
static void test_names(void) {
    char name[300], tmp[300];
    size_t n, k, i;
    const char *path;
    for (k = 0; k < 2; k++) {
        for (n = 90; n <= 255; n += n < 110 ? 1 : 29) {
            strcpy(name, "r/");
            for (i = 0; i < n; i++) name[2 + i] = k ? "\xC3\xA4"[i % 2] : (char)('a' + i % 26);
            if (n % 2) name[1 + n] = 'x';
            name[2 + n] = 0;
            path = in_dir(name);
            EXPECT(save(path, (float)n, 10) && saved(path, NULL) == (float)n);
            EXPECT(save(path, 1, 10) && saved(path, NULL) == 1);
            EXPECT(unlink(path) == 0 && dir_entries(in_dir("r"), "tmp") == 0);
            FINE();
        }
    }
    memset(name, 'n', 257);
    memcpy(name, "r/", 2);
    name[257] = 0;
    sprintf(tmp, "%.102s.1.0.tmp", name);
    put_text(tmp, "left by a killed process");
    sprintf(tmp, "%.101s.1.0.tmp", name);
    put_text(tmp, "for another target");
    path = in_dir(name);
    EXPECT(save(path, 1, 10) && dir_entries(in_dir("r"), ".tmp") == 1);
    EXPECT(unlink(path) == 0 && unlink(in_dir(tmp)) == 0);
    FINE();
}

static void test_owner(void) {
    const char *path = in_dir("r/owned");
    struct stat st;
    if (geteuid() != 0) {
        skip("owner and group (not root)");
        return;
    }
    EXPECT(save(path, 1, 10) && chown(path, 1234, 1235) == 0 && chmod(path, 04640) == 0);
    EXPECT(save(path, 2, 10) && stat(path, &st) == 0 && st.st_uid == 1234 && st.st_gid == 1235);
    EXPECT((st.st_mode & 07777) == 0640);
    EXPECT(unlink(path) == 0);
    FINE();
}
#endif

#if defined(__linux__) && !defined(SEQTX_STDIO_FILES)
/* Each system call of a save fails, either once or from then on. Afterwards, the file
   must be the old one or the complete new one, with the mode of the old one. No
   temporary file and no descriptor may remain, and the error must state the reason. */
static int fault_save(const char *path) {
    int done;
    memset(fault.count, 0, sizeof fault.count);
    fault.on = 1;
    done = save(path, 2, 5000);
    fault.on = 0;
    return done;
}

static const char *const call_name[CALLS] = {"open", "write", "fsync", "rename",
                                             "close", "fchmod", "unlink", "stat",
                                             "fstat", "access", "readlink", "fcntl"};

static void fault_case(const char *folder) {
    struct stat st;
    float now;
    int done, ok, left, fds = dir_entries("/proc/self/fd", "");
    char path[768], stale[768], error[600];
    snprintf(path, sizeof path, "%s/file", folder);
    snprintf(stale, sizeof stale, "%s/file.1.0.tmp", folder);
    EXPECT(save(path, 1, 5000) && chmod(path, 0640) == 0);
    put_text("f/file.1.0.tmp", "left by a killed process");
    done = fault_save(path);
    snprintf(error, sizeof error, "%.500s", stx_error(x));
    ok = stx_ok(x) == done;
    stx_clear_error(x);
    now = saved(path, NULL);
    unlinkat(AT_FDCWD, stale, 0);
    left = dir_entries(folder, "tmp");
    fds -= dir_entries("/proc/self/fd", "");
    ok &= done ? now == 2 : now == 1 || (now == 2 && strstr(error, "in place") != NULL);
    ok &= done || strstr(error, strerror(fault.code)) != NULL;
    ok &= stat(path, &st) == 0 && (st.st_mode & 0777) == 0640;
    ok &= fds == 0 && (fault.call == UNLINK || left == 0);
    if (EXPECT(ok)) return;
    printf("  %s, call %d%s: %s: %s, file of %g, mode %o, %d temporaries, %d descriptors: %s\n",
           call_name[fault.call], fault.at, fault.all ? " and later" : "", strerror(fault.code),
           done ? "saved" : "not saved", (double)now, (unsigned)st.st_mode & 0777, left, -fds,
           error);
    remove_tree(folder);
    EXPECT(mkdir(folder, 0777) == 0);
}

static void test_faults(void) {
    static const int codes[] = {EIO, ENOSPC, EACCES, EINTR, ENOLCK, EMFILE};
    char path[768], folder[700];
    int most[CALLS], call, all, at;
    size_t c;
    snprintf(folder, sizeof folder, "%.600s", in_dir("f"));
    snprintf(path, sizeof path, "%s/file", folder);
    EXPECT(mkdir(folder, 0777) == 0 && save(path, 1, 5000));
    put_text("f/file.1.0.tmp", "left by a killed process");
    memset(&fault, 0, sizeof fault);
    fault.call = -1;
    inherited = 0;
    EXPECT(fault_save(path) && dir_entries(folder, "tmp") == 0);
    EXPECT(inherited == 0);
    memcpy(most, fault.count, sizeof most);
    for (call = 0; call < CALLS; call++)
        for (all = 0; all < 2; all++)
            for (at = 1; at <= most[call]; at++)
                for (c = 0; c < sizeof codes / sizeof *codes; c++) {
                    /* skipped, because the library would retry open and write forever */
                    if (all && codes[c] == EINTR && (call == OPEN || call == WRITE)) continue;
                    fault.call = call;
                    fault.all = all;
                    fault.at = at;
                    fault.code = codes[c];
                    fault.short_write = call == WRITE && codes[c] == EMFILE;
                    fault_case(folder);
                }
    FINE();
}
#endif

/* If the disk is full, the old file must be kept and no temporary file may remain. A
   full disk is simulated by a limit on the file size, and by a small tmpfs if one can
   be mounted. */
static void test_disk_full(void) {
    const char *path = in_dir("r/full");
    struct rlimit old, lim;
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    EXPECT(save(path, 1, 10));
    EXPECT(getrlimit(RLIMIT_FSIZE, &old) == 0);
    lim = old;
    lim.rlim_cur = 20000;
    EXPECT(setrlimit(RLIMIT_FSIZE, &lim) == 0);
    EXPECT(!save(path, 2, 100000));
    EXPECT(setrlimit(RLIMIT_FSIZE, &old) == 0);
    signal(SIGXFSZ, handler);
    ERROR(STX_ERR_IO, "any existing file of this name is unchanged");
    EXPECT(saved(path, NULL) == 1 && dir_entries(in_dir("r"), "full") == 1);
    FINE();
#if defined(__linux__)
    {
        const char *disk = in_dir("disk");
        int status;
        pid_t pid;
        EXPECT(mkdir(disk, 0700) == 0);
        fflush(stdout);
        pid = fork();
        /* a private mount that disappears with this process */
        if (pid == 0) {
            int ok;
            if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_PRIVATE | MS_REC, NULL) != 0
                || mount("none", disk, "tmpfs", 0, "size=64k") != 0)
                _exit(3);
            path = in_dir("disk/full");
            ok = save(path, 1, 10) && !save(path, 2, 100000) && stx_error_code(x) == STX_ERR_IO
                 && strstr(stx_error(x), "No space left") != NULL;
            if (!ok) printf("tmpfs: %s\n", stx_error(x));
            stx_clear_error(x);
            ok = ok && saved(path, NULL) == 1 && dir_entries(disk, "full") == 1 && save(path, 3, 10)
                 && saved(path, NULL) == 3;
            fflush(stdout);
            _exit(ok ? 0 : 1);
        }
        EXPECT(waitpid(pid, &status, 0) == pid && WIFEXITED(status));
        if (WEXITSTATUS(status) == 3)
            skip("a full disk on a tmpfs (cannot mount one)");
        else
            EXPECT(WEXITSTATUS(status) == 0);
    }
#endif
}

/* After SIGKILL at any moment, the file must be complete and must not be older than it
   was before the killed process started. */
static void test_kill(void) {
    const char *path = in_dir("r/kill");
    float last = 1;
    int i;
    EXPECT(save(path, 1, 50000));
    for (i = 0; i < 20; i++) {
        struct timespec t;
        int status;
        pid_t pid;
        float now;
        size_t n = 0;
        fflush(stdout);
        pid = fork();
        if (pid == 0) {
            float v;
            for (v = last + 1;; v += 1)
                if (!save(path, v, 50000)) _exit(1);
        }
        t.tv_sec = 0;
        t.tv_nsec = 1000000L + 1700000L * i;
        nanosleep(&t, NULL);
        kill(pid, SIGKILL);
        EXPECT(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status));
        now = saved(path, &n);
        EXPECT(now >= last && n == 50000);
        FINE();
        last = now;
    }
    EXPECT(last > 1);
}


// >>utilities for code that reads files: maps, UTF-8, quoting

static void test_tools(void) {
    static const struct {
        const char *s;
        size_t n, len;
        uint32_t c;
    } utf[] = {{"a", 1, 1, 'a'},
               {"\0", 1, 1, 0},
               {"\xC3\xA9", 2, 2, 0xE9},
               {"\xE2\x82\xAC.", 4, 3, 0x20AC},
               {"\xF0\x9F\x98\x80", 4, 4, 0x1F600},
               {"\xF4\x8F\xBF\xBF", 4, 4, 0x10FFFF},
               {"", 0, 0, 0},
               {"\xC3", 1, 0, 0},
               {"\x80", 1, 0, 0},
               {"\xC0\xAF", 2, 0, 0},
               {"\xE0\x80\xAF", 3, 0, 0},
               {"\xED\xA0\x80", 3, 0, 0},
               {"\xF4\x90\x80\x80", 4, 0, 0},
               {"\xF8\x88\x80\x80\x80", 5, 0, 0}};

    char q[STX_QUOTE], many[200];
    stx_map m;
    const char *path = put_text("map.txt", "two\nlines");
    uint32_t c;
    size_t i;
    for (i = 0; i < sizeof utf / sizeof *utf; i++) {
        EXPECT(stx_utf8(utf[i].s, utf[i].n, &c) == utf[i].len);
        if (utf[i].len) EXPECT(c == utf[i].c);
    }
    memset(many, '\xFF', sizeof many);
    EXPECT(!strcmp(stx_quote(q, "it is\n", 6), "it is\\x0A") && !strcmp(stx_quote(q, "", 0), ""));
    EXPECT(!strcmp(stx_quote(q, "\xC3\x9C\xC2\x85\xC3", 5), "\xC3\x9C\\xC2\\x85\\xC3"));
    EXPECT(!strcmp(stx_quote(q, "\xD8\x9C", 2), "\\xD8\\x9C"));     /* U+061C */
    EXPECT(strlen(stx_quote(q, many, sizeof many)) == 4 * 60 + 3
           && !strcmp(q + 4 * 59, "\\xFF..."));
    memset(many, 'a', 59);
    strcpy(many + 59, "\xC3\x9C");      /* does not fit */
    EXPECT(strlen(stx_quote(q, many, 61)) == 59 + 3);
    EXPECT(stx_map_open(x, &m, path) == 1 && m.size == 9 && m.data
           && !memcmp(m.data, "two\nlines", 9));
    stx_map_close(&m);
    EXPECT(!m.data && !m.size);
    stx_map_close(&m);
    stx_map_close(NULL);
    EXPECT(stx_map_open(x, &m, put_text("empty.txt", "")) == 1 && m.size == 0);
    stx_map_close(&m);
    FINE();
    EXPECT(stx_map_open(x, &m, in_dir("none.txt")) == 0 && !m.data && !m.size);
    ERROR(STX_ERR_IO, "none.txt");
    EXPECT(stx_map_open(x, &m, dir) == 0);
    ERROR(STX_ERR_IO, "regular file");
    EXPECT(stx_map_open(x, &m, NULL) == 0);
    ERROR(STX_ERR_ARG, "stx_map_open");
    EXPECT(stx_map_open(NULL, &m, path) == 0 && !m.data);
    stx_fail(x, STX_ERR_ARG, "an earlier error");
    EXPECT(stx_map_open(x, &m, path) == 0 && !m.data && !m.size);
    ERROR(STX_ERR_ARG, "earlier");
    stx_map_close(&m);
}


// >>vocabularies

static stx_vocab_desc desc(int kind, int order) {
    stx_vocab_desc d;
    memset(&d, 0, sizeof d);
    d.kind = kind;
    d.order = order;
    return d;
}

/* Returns the pieces of a vocabulary in order, each followed by '|'. */
static const char *pieces(const stx_vocab *v) {
    static char out[4096];
    size_t i, n, at = 0;
    for (i = 0; i < stx_vocab_size(v); i++) {
        const char *s = stx_vocab_piece(v, (int32_t)i, &n);
        if (!s || at + n + 2 > sizeof out) break;
        memcpy(out + at, s, n);
        at += n;
        out[at++] = '|';
    }
    out[at] = 0;
    return out;
}

/* Returns the pieces of a corpus's tokens in the format of pieces(). */
static const char *tokens(const stx_vocab *v, const stx_corpus *c) {
    static char out[4096];
    size_t i, n, at = 0;
    int32_t id;
    out[0] = 0;
    for (i = 0; i < stx_corpus_size(c); i++) {
        const char *s;
        if (!stx_corpus_read(c, i, 1, &id) || (s = stx_vocab_piece(v, id, &n)) == NULL
            || at + n + 2 > sizeof out)
            return "?";
        memcpy(out + at, s, n);
        at += n;
        out[at++] = '|';
    }
    out[at] = 0;
    return out;
}

/* Checks the vocabulary and the tokens of a text. */
static void text_tokens(int line, const stx_vocab_desc *d, const void *text, size_t n,
                        const char *voc, const char *toks) {
    const char *path = put_bytes("text", text, n);
    stx_vocab *v = stx_vocab_build(x, d, path, 0, 0);
    stx_corpus *c = stx_corpus_open(x, v, path, 0, 0);
    check_fine(x, line);
    test_same(pieces(v), voc, __FILE__, line);
    test_same(tokens(v, c), toks, __FILE__, line);
    test_check(stx_corpus_bytes(c) == n, "stx_corpus_bytes", __FILE__, line);
    stx_corpus_close(c);
    stx_vocab_free(v);
}

#define TOKENS(d, text, voc, toks) text_tokens(__LINE__, &(d), text, sizeof(text) - 1, voc, toks)

static void test_words(void) {
    stx_vocab_desc d = desc(STX_TOK_WORDS, STX_ORDER_FIRST);
    TOKENS(d, "b a b\nc\n", "b|a|<eos>|c|", "b|a|b|<eos>|c|<eos>|");
    /* A text does not have to end with a newline. */
    TOKENS(d, "b a b\nc", "b|a|<eos>|c|", "b|a|b|<eos>|c|<eos>|");
    TOKENS(d, "a\r\nb\rc\n\rd", "a|<eos>|b|c|d|", "a|<eos>|b|<eos>|c|<eos>|<eos>|d|<eos>|");
    TOKENS(d, "\n\n a \n \n", "<eos>|a|", "<eos>|<eos>|a|<eos>|<eos>|");
    /* As in Python, the line " " contains no words. */
    TOKENS(d, "a\n ", "a|<eos>|", "a|<eos>|<eos>|");
    TOKENS(d, "  \t ", "<eos>|", "<eos>|");
}

static size_t put_utf8(char *o, uint32_t c) {
    size_t n = 1, i;
    if (c >= 0x80) n++;
    if (c >= 0x800) n++;
    if (c >= 0x10000) n++;
    for (i = n - 1; i > 0; i--, c >>= 6) o[i] = (char)(0x80 | (c & 0x3f));
    /* the first byte starts with n one bits */
    o[0] = (char)(n == 1 ? c : (0xf00u >> n & 0xf0u) | c);
    return n;
}

/* Writes to o a word that consists of "a", code point c and "b", and then a blank.
   Returns the length of the word. */
static size_t put_word(char *o, uint32_t c) {
    size_t n;
    o[0] = 'a';
    n = 1 + put_utf8(o + 1, c);
    o[n++] = 'b';
    o[n] = ' ';
    return n;
}

static void test_words_unicode(void) {
    stx_vocab_desc d = desc(STX_TOK_WORDS, STX_ORDER_FIRST);
    static const uint32_t white[][2] = {{9, 13},          {28, 32},         {0x85, 0x85},
                                        {0xA0, 0xA0},     {0x1680, 0x1680}, {0x2000, 0x200A},
                                        {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F},
                                        {0x3000, 0x3000}};
    FILE *f;
    uint32_t c;
    size_t i, wrong = 0, words = 0;
    stx_vocab *v;
    char s[8];
    TOKENS(d,
           "a\x0B"
           "b\x0C"
           "c\x1C"
           "d\x1D"
           "e\x1E"
           "f\x1Fg\xC2\x85h\xC2\xA0i\xE1\x9A\x80j\xE2\x80\x80k\xE2\x80\x8Al"
           "\xE2\x80\xA8m\xE2\x80\xA9n"
           "\xE2\x80\xAFo\xE2\x81\x9Fp\xE3\x80\x80q\xE2\x80\x8Br",
           "a|b|c|d|e|f|g|h|i|j|k|l|m|n|o|p|q\xE2\x80\x8Br|<eos>|",
           "a|b|c|d|e|f|g|h|i|j|k|l|m|n|o|p|q\xE2\x80\x8Br|<eos>|");
    /* a text with one word per code point */
    f = fopen(in_dir("all"), "wb");
    for (c = 0; c < 0x110000; c++) {
        if (c >= 0xD800 && c < 0xE000) continue;
        fwrite(s, 1, put_word(s, c) + 1, f);
    }
    fclose(f);
    v = stx_vocab_build(x, &d, in_dir("all"), 0, 0);
    FINE();
    for (c = 0; c < 0x110000; c++) {
        size_t n;
        int is_white = 0;
        if (c >= 0xD800 && c < 0xE000) continue;
        for (i = 0; i < sizeof white / sizeof *white; i++)
            is_white |= c >= white[i][0] && c <= white[i][1];
        n = put_word(s, c);
        wrong += (stx_vocab_find(v, s, n) < 0) != is_white;
        words += !is_white;
    }
    EXPECT(wrong == 0);
    EXPECT(words == 1112064 - 29 && stx_vocab_size(v) == words + 3);
    stx_vocab_free(v);
    remove(in_dir("all"));
}

static void test_orders(void) {
    /* counts: <eos> 2, a 3, b 2, c 2, d 1, e 1 */
    static const char text[] = "d a b c a\nb c e a\n";
    stx_vocab_desc d = desc(STX_TOK_WORDS, STX_ORDER_FIRST);
    static const char toks[] = "d|a|b|c|a|<eos>|b|c|e|a|<eos>|";
    TOKENS(d, text, "d|a|b|c|<eos>|e|", toks);
    d.order = STX_ORDER_COUNT_LATER;
    TOKENS(d, text, "a|<eos>|c|b|e|d|", toks);
    d.order = STX_ORDER_COUNT_EARLIER;
    TOKENS(d, text, "a|b|c|<eos>|d|e|", toks);
    d.eos_first = 1;
    TOKENS(d, text, "<eos>|a|b|c|d|e|", toks);
    d.order = STX_ORDER_FIRST;
    TOKENS(d, text, "<eos>|d|a|b|c|e|", toks);
    d.eos_first = 0;
    d.min_count = 2;
    TOKENS(d, text, "a|b|c|<eos>|<unk>|", "<unk>|a|b|c|a|<eos>|b|c|<unk>|a|<eos>|");
    d.order = STX_ORDER_COUNT_EARLIER;
    TOKENS(d, text, "a|b|c|<eos>|<unk>|", "<unk>|a|b|c|a|<eos>|b|c|<unk>|a|<eos>|");
    d.min_count = 100; /* <eos> is always kept */
    TOKENS(d, text, "<unk>|<eos>|",
           "<unk>|<unk>|<unk>|<unk>|<unk>|<eos>|<unk>|<unk>|<unk>|<unk>|<eos>|");
    d.min_count = 2;
    d.order = STX_ORDER_FIRST;
    TOKENS(d, "a a <unk> b\n", "a|<unk>|<eos>|", "a|a|<unk>|<unk>|<eos>|");
    TOKENS(d, "a a\n", "a|<eos>|<unk>|", "a|a|<eos>|");
}

static void test_chars(void) {
    stx_vocab_desc d = desc(STX_TOK_CHARS, STX_ORDER_FIRST);
    stx_vocab *v;
    stx_corpus *c;
    char text[256];
    int i, n = 0;
    TOKENS(d,
           "b\xC3\xA4\xE2\x82\xAC\xF0\x9F\x98\x80"
           "b\r\n",
           "b|\xC3\xA4|\xE2\x82\xAC|\xF0\x9F\x98\x80|\r|\n|",
           "b|\xC3\xA4|\xE2\x82\xAC|\xF0\x9F\x98\x80|b|\r|\n|");
    d.eos = 1;
    TOKENS(d, "ab\r\na\n\rc", "a|b|<eos>|c|", "a|b|<eos>|a|<eos>|<eos>|c|<eos>|");
    /* The vocabulary of text8 in the original code: 26 letters, "_" and <eos>. */
    for (i = 0; i < 26; i++) {
        text[n++] = (char)('z' - i);
        text[n++] = '_';
    }
    text[n] = 0;
    v = stx_vocab_build(x, &d, put_text("text8", text), 0, 0);
    c = stx_corpus_open(x, v, in_dir("text8"), 0, 0);
    EXPECT(stx_vocab_size(v) == 28 && stx_corpus_size(c) == 53 && stx_corpus_bytes(c) == 52);
    stx_corpus_close(c);
    stx_vocab_free(v);

    d.eos = 0;
    EXPECT(!stx_vocab_build(x, &d,
                            put_text("latin1", "stra\xDF"
                                               "e"),
                            0, 0));
    ERROR(STX_ERR_FORMAT, "latin1 is not UTF-8: byte 4 (0xDF)");
    d.kind = STX_TOK_WORDS;
    EXPECT(!stx_vocab_build(x, &d, in_dir("latin1"), 0, 0));
    ERROR(STX_ERR_FORMAT, "byte 4 (0xDF)");
    EXPECT(!stx_vocab_build(x, &d, put_text("latin1", "a \xE2\x82"), 0, 0));
    ERROR(STX_ERR_FORMAT, "byte 2 (0xE2)");
    EXPECT(!stx_vocab_build(x, &d, put_text("latin1", "a \xC0\xAF"), 0, 0));
    ERROR(STX_ERR_FORMAT, "byte 2 (0xC0)");
}

static void test_bytes(void) {
    unsigned char all[256];
    int32_t id[300];
    size_t n, i, wrong = 0;
    const char *path;
    stx_vocab *v;
    stx_corpus *c;
    for (i = 0; i < 256; i++) all[i] = (unsigned char)(255 - i);
    path = put_bytes("all256", all, 256);
    v = stx_vocab_build(x, NULL, NULL, 0, 0);
    EXPECT(stx_vocab_size(v) == 256 && stx_vocab_eos(v) == -1 && stx_vocab_unk(v) == -1
           && stx_vocab_kind(v) == STX_TOK_BYTES);
    c = stx_corpus_open(x, v, path, 0, 0);
    EXPECT(stx_corpus_size(c) == 256 && stx_corpus_bytes(c) == 256
           && stx_corpus_read(c, 0, 256, id));
    for (i = 0; i < 256; i++) wrong += id[i] != (int32_t)(255 - i);
    for (i = 0; i < 256; i++)
        wrong += stx_vocab_find(v, (const char *)&all[i], 1) != (int32_t)(255 - i);
    for (i = 0; i < 256; i++)
        wrong += *(const unsigned char *)stx_vocab_piece(v, (int32_t)i, &n) != i || n != 1;
    EXPECT(wrong == 0);
    EXPECT(stx_corpus_read(c, 255, 1, id) && id[0] == 0 && stx_corpus_read(c, 256, 0, id)
           && stx_corpus_read(c, 256, 0, NULL));
    EXPECT(!stx_corpus_read(c, 255, 2, id));
    ERROR(STX_ERR_ARG, "inside the 256 tokens");
    EXPECT(!stx_corpus_read(c, 257, 0, id));
    ERROR(STX_ERR_ARG, "257");
    EXPECT(!stx_corpus_read(c, (size_t)-1, 2, id));
    ERROR(STX_ERR_ARG, "inside the 256 tokens");
    EXPECT(!stx_corpus_read(c, 0, 1, NULL));
    ERROR(STX_ERR_ARG, "NULL");
    stx_corpus_close(c);
    c = stx_corpus_open(x, v, path, 100, 110);
    EXPECT(stx_corpus_size(c) == 10 && stx_corpus_read(c, 0, 10, id) && id[0] == 155
           && id[9] == 146);
    stx_corpus_close(c);
    stx_vocab_free(v);
}

/* The vocabulary must contain only the bytes that occur in the text. */
static void test_compact(void) {
    stx_vocab_desc d = desc(STX_TOK_BYTES, STX_ORDER_FIRST);
    unsigned char text[5000];
    int32_t id[2];
    size_t n, i, wrong = 0;
    const char *path;
    stx_vocab *v;
    stx_corpus *c;
    d.compact = 1;
    TOKENS(d, "ba\nb\r\xFF\n", "b|a|<eos>|\r|\xFF|", "b|a|<eos>|b|\r|\xFF|<eos>|");
    TOKENS(d, "ba\nb", "b|a|<eos>|", "b|a|<eos>|b|<eos>|");
    TOKENS(d, "ba", "b|a|<eos>|", "b|a|<eos>|");
    d.order = STX_ORDER_COUNT_LATER;
    TOKENS(d, "bacab\n", "a|b|<eos>|c|", "b|a|c|a|b|<eos>|");
    d.order = STX_ORDER_FIRST;
    /* The alphabet of enwik8: 205 distinct byte values, one of which is 10. */
    for (i = 0; i < sizeof text; i++)
        text[i] = (unsigned char)(i * 31 % 205 == 7 ? 10 : 20 + i * 31 % 205);
    path = put_bytes("enwik", text, sizeof text);
    v = stx_vocab_build(x, &d, path, 0, 4000);
    EXPECT(stx_vocab_size(v) == 205 && stx_vocab_eos(v) >= 0);
    c = stx_corpus_open(x, v, path, 4000, 5000);
    EXPECT(stx_corpus_size(c) == 1000u + (text[4999] != 10));
    for (wrong = i = 0; i < 1000; i++) {
        const char *s;
        EXPECT(stx_corpus_read(c, i, 1, id));
        s = stx_vocab_piece(v, id[0], &n);
        wrong += text[4000 + i] == 10 ? id[0] != stx_vocab_eos(v)
                                      : !s || n != 1 || (unsigned char)*s != text[4000 + i];
    }
    EXPECT(wrong == 0);
    stx_corpus_close(c);
    EXPECT(stx_corpus_open(x, v,
                           put_text("odd", "\x1e\x1f"
                                           "\x14\xFE"),
                           0, 0)
           == NULL);
    ERROR(STX_ERR_FORMAT, "odd: the byte '\\xFE' at byte 3 is not in the vocabulary (205 pieces)");
    stx_vocab_free(v);
    d.min_count = 2; /* adds <unk>, without which the text cannot be tokenised */
    v = stx_vocab_build(x, &d, path, 0, 4000);
    c = stx_corpus_open(x, v, in_dir("odd"), 0, 0);
    EXPECT(stx_corpus_read(c, 3, 2, id) && id[0] == stx_vocab_unk(v) && id[1] == stx_vocab_eos(v));
    FINE();
    stx_corpus_close(c);
    stx_vocab_free(v);
}

static void test_vocab_errors(void) {
    stx_vocab_desc d = desc(STX_TOK_WORDS, STX_ORDER_FIRST);
    stx_vocab *v, *chars;
    const char *path = put_text("train", "the cat sat\n");
    EXPECT(!stx_vocab_build(x, &d, in_dir("nothing here"), 0, 0));
    ERROR(STX_ERR_IO, "nothing here: No such file");
    EXPECT(!stx_vocab_build(x, &d, NULL, 0, 0));
    ERROR(STX_ERR_ARG, "NULL");
    EXPECT(!stx_vocab_build(x, &d, put_text("empty", ""), 0, 0));
    ERROR(STX_ERR_FORMAT, "empty");
    EXPECT(!stx_vocab_build(x, &d, path, 5, 99));
    ERROR(STX_ERR_ARG, "expected a range inside the 12 bytes of the file, got 5 to 99");
    EXPECT(!stx_vocab_build(x, &d, path, 9, 5));
    ERROR(STX_ERR_ARG, "9 to 5");
    EXPECT(!stx_vocab_build(x, &d, path, 99, 0));
    ERROR(STX_ERR_ARG, "99 to 12");
    EXPECT(!stx_vocab_build(x, &d, path, UINT64_MAX, UINT64_MAX));
    ERROR(STX_ERR_ARG, "range");
    EXPECT(!stx_vocab_build(x, &d, path, 12, 0));
    ERROR(STX_ERR_FORMAT, "no text between");
    d.kind = 5;
    EXPECT(!stx_vocab_build(x, &d, path, 0, 0));
    ERROR(STX_ERR_ARG, "got 5 and 0");
    d.kind = STX_TOK_WORDS;
    d.order = -1;
    EXPECT(!stx_vocab_build(x, &d, path, 0, 0));
    ERROR(STX_ERR_ARG, "got 2 and -1");
    d.order = 0;
    v = stx_vocab_build(x, &d, path, 0, 0);
    EXPECT(!stx_corpus_open(x, v, put_text("valid", "the cat\nsat dog"), 0, 0));
    ERROR(STX_ERR_FORMAT, "valid: the word 'dog' at byte 12 is not in the vocabulary (4 pieces)");
    EXPECT(!stx_corpus_open(x, v, in_dir("nothing here"), 0, 0));
    ERROR(STX_ERR_IO, "No such file");
    EXPECT(!stx_corpus_open(x, v, in_dir("empty"), 0, 0));
    ERROR(STX_ERR_FORMAT, "use a file or a range with text");
    EXPECT(!stx_corpus_open(x, v, dir, 0, 0));
    ERROR(STX_ERR_IO, "directory");
    EXPECT(!stx_corpus_open(x, v, NULL, 0, 0));
    ERROR(STX_ERR_ARG, "NULL");
    EXPECT(!stx_corpus_open(x, NULL, path, 0, 0) && stx_ok(x));
    EXPECT(stx_vocab_find(v, "cat", 3) == 1 && stx_vocab_find(v, "ca", 2) == -1
           && stx_vocab_find(v, "", 0) == -1);
    EXPECT(stx_vocab_piece(v, -1, NULL) == NULL && stx_vocab_piece(v, 4, NULL) == NULL
           && stx_vocab_piece(v, 3, NULL) != NULL);
    d.kind = STX_TOK_CHARS;
    chars = stx_vocab_build(x, &d, path, 0, 0);
    EXPECT(!stx_corpus_open(x, chars, put_text("valid", "the k"), 0, 0));
    ERROR(STX_ERR_FORMAT, "the character 'k' at byte 4");
    stx_vocab_free(chars);
    stx_vocab_free(v);
    stx_vocab_free(NULL);
    stx_corpus_close(NULL);
    EXPECT(stx_vocab_size(NULL) == 0 && stx_vocab_find(NULL, "a", 1) == -1
           && stx_vocab_encode(NULL, "a", 1, NULL, 0) == STX_NPOS);
    EXPECT(stx_corpus_size(NULL) == 0 && !stx_corpus_read(NULL, 0, 0, NULL)
           && stx_vocab_save(NULL, NULL, 0) == 0);
}

static void test_encode(void) {
    stx_vocab_desc d = desc(STX_TOK_WORDS, STX_ORDER_FIRST);
    static const char prompt[] = "cat the\n sat  ";
    stx_vocab *v = stx_vocab_build(x, &d, put_text("train", "the cat sat\n"), 0, 0);
    int32_t id[16];
    char out[64];
    size_t n, k, i;
    n = stx_vocab_encode(v, prompt, sizeof prompt - 1, id, 16);
    EXPECT(n == 4 && id[0] == 1 && id[1] == 0 && id[2] == 3 && id[3] == 2);
    EXPECT(stx_vocab_encode(v, prompt, sizeof prompt - 1, NULL, 0) == 4);
    id[2] = -7;
    EXPECT(stx_vocab_encode(v, prompt, sizeof prompt - 1, id, 2) == 4 && id[2] == -7);
    id[2] = 3;
    n = stx_vocab_decode(v, id, 4, out, sizeof out);
    EXPECT(n == 13 && !memcmp(out, "cat the \nsat ", 13));
    EXPECT(stx_vocab_decode(v, id, 4, NULL, 0) == 13);
    memset(out, '#', sizeof out);
    EXPECT(stx_vocab_decode(v, id, 4, out, 5) == 13 && !memcmp(out, "cat t#", 6));
    /* decoding token by token */
    for (k = i = 0; i < 4; i++) k += stx_vocab_decode(v, id + i, 1, out + k, sizeof out - k);
    EXPECT(k == 13 && !memcmp(out, "cat the \nsat ", 13));
    EXPECT(stx_vocab_encode(v, "", 0, NULL, 0) == 0 && stx_vocab_decode(v, NULL, 0, NULL, 0) == 0);
    EXPECT(stx_vocab_encode(v, "the  dog", 8, id, 16) == STX_NPOS);
    ERROR(STX_ERR_FORMAT, "'dog' at byte 5");
    EXPECT(stx_vocab_encode(v, "the \xFF", 5, id, 16) == STX_NPOS);
    ERROR(STX_ERR_FORMAT, "byte 4 (0xFF)");
    EXPECT(stx_vocab_encode(v, NULL, 5, id, 16) == STX_NPOS);
    ERROR(STX_ERR_ARG, "NULL");
    id[0] = 4;
    EXPECT(stx_vocab_decode(v, id, 1, out, 64) == STX_NPOS);
    ERROR(STX_ERR_ARG, "expected an id below 4, got 4");
    id[0] = -1;
    EXPECT(stx_vocab_decode(v, id, 1, out, 64) == STX_NPOS);
    ERROR(STX_ERR_ARG, "got -1");
    stx_vocab_free(v);
    d.kind = STX_TOK_BYTES;
    d.compact = 1;
    v = stx_vocab_build(x, &d, put_text("train", "ab\ncd"), 0, 0);
    n = stx_vocab_encode(v, "d\na", 3, id, 16);
    EXPECT(n == 3 && id[1] == stx_vocab_eos(v) && stx_vocab_decode(v, id, n, out, 64) == 3
           && !memcmp(out, "d\na", 3));
    EXPECT(stx_vocab_encode(v, "d\na<", 4, id, 16) == STX_NPOS);
    ERROR(STX_ERR_FORMAT, "the byte '<' at byte 3");
    stx_vocab_free(v);
}

/* Grows the vocabulary of `old` by the text `new_text` and compares the pieces. Checks
   that the old vocabulary has not changed, that a text has the same tokens in both, and
   that the new one can be stored. */
static void grown(int line, const stx_vocab_desc *d, const char *old, const char *new_text,
                  uint64_t min_count, const char *expected) {
    stx_vocab *v = stx_vocab_build(x, d, put_text("old", old), 0, 0), *w, *again;
    unsigned char blob[512];
    char before[256];
    int32_t a[64], b[64];
    size_t n;
    snprintf(before, sizeof before, "%s", pieces(v));
    w = stx_vocab_grow(v, put_text("new", new_text), 0, 0, min_count);
    check_fine(x, line);
    test_same(pieces(w), expected, __FILE__, line);
    test_same(pieces(v), before, __FILE__, line);
    test_check(!strncmp(pieces(w), before, strlen(before)), "other ids", __FILE__, line);
    test_check(stx_vocab_eos(w) == stx_vocab_eos(v), "another <eos>", __FILE__, line);
    test_check(stx_vocab_unk(w) == stx_vocab_find(w, "<unk>", 5), "another <unk>", __FILE__, line);
    n = stx_vocab_encode(v, old, strlen(old), a, 64);
    test_check(stx_vocab_encode(w, old, strlen(old), b, 64) == n && !memcmp(a, b, n * sizeof *a),
               "other tokens", __FILE__, line);
    n = stx_vocab_save(w, blob, sizeof blob);
    again = stx_vocab_load(x, blob, n);
    check_fine(x, line);
    test_same(pieces(again), expected, __FILE__, line);
    stx_vocab_free(again);
    stx_vocab_free(w);
    stx_vocab_free(v);
}

#define GROWN(d, old, new_text, min_count, expected) \
  grown(__LINE__, &(d), old, new_text, min_count, expected)

static void test_grow(void) {
    stx_vocab_desc d = desc(STX_TOK_WORDS, STX_ORDER_FIRST);
    const char *path;
    stx_vocab *v, *w;
    GROWN(d, "b a b\n", "a c b\nd c", 0, "b|a|<eos>|c|d|");
    GROWN(d, "b a b\n", "a b", 1, "b|a|<eos>|");
    GROWN(d, "b a b\n", "a <unk> d\n", 0, "b|a|<eos>|<unk>|d|");
    /* A word that occurs once is <unk>, which is added. Old words always stay. */
    GROWN(d, "b a b\n", "d c e c c d\n", 2, "b|a|<eos>|d|c|<unk>|");
    GROWN(d, "b a b\n", "d c e c c d\n", 3, "b|a|<eos>|c|<unk>|");
    GROWN(d, "b <unk> a", "d c e c\n", 2, "b|<unk>|a|<eos>|c|");
    GROWN(d, "b <unk> a", "d c e c\n", 1, "b|<unk>|a|<eos>|d|c|e|");
    d.order = STX_ORDER_COUNT_LATER;
    d.eos_first = 1;
    GROWN(d, "b a b c b a\n", "e d d", 0, "<eos>|b|a|c|e|d|");
    d = desc(STX_TOK_CHARS, STX_ORDER_FIRST);
    GROWN(d, "ba\n", "a\xC3\xA4\n \r", 0, "b|a|\n|\xC3\xA4| |\r|");
    d.eos = 1;
    GROWN(d, "ba\n", "a\xC3\xA4\n \r", 0, "b|a|<eos>|\xC3\xA4| |");
    d = desc(STX_TOK_BYTES, STX_ORDER_FIRST);
    d.compact = 1;
    GROWN(d, "ba\n", "a\xC3\xA4\n", 0, "b|a|<eos>|\xC3|\xA4|");

    /* a range of a file, and errors */
    v = stx_vocab_build(x, &d, put_text("old", "ba\n"), 0, 0);
    path = put_text("new", "abcdef");
    w = stx_vocab_grow(v, path, 1, 4, 0);
    test_same(pieces(w), "b|a|<eos>|c|d|", __FILE__, __LINE__);
    stx_vocab_free(w);
    EXPECT(!stx_vocab_grow(v, path, 1, 9, 0));
    ERROR(STX_ERR_ARG, "got 1 to 9");
    EXPECT(!stx_vocab_grow(v, NULL, 0, 0, 0));
    ERROR(STX_ERR_ARG, "stx_vocab_grow: path");
    EXPECT(!stx_vocab_grow(v, in_dir("nothing here"), 0, 0, 0));
    ERROR(STX_ERR_IO, "No such file");
    EXPECT(!stx_vocab_grow(NULL, path, 0, 0, 0) && stx_ok(x));
    stx_vocab_free(v);
    v = stx_vocab_build(x, NULL, NULL, 0, 0);
    EXPECT(!stx_vocab_grow(v, path, 0, 0, 0));
    ERROR(STX_ERR_ARG, "all 256 bytes");
    stx_vocab_free(v);
    d = desc(STX_TOK_IDS, STX_ORDER_FIRST);
    d.pieces = put_text("list.vocab", "a\nb\n");
    v = stx_vocab_build(x, &d, NULL, 0, 0);
    EXPECT(!stx_vocab_grow(v, path, 0, 0, 0));
    ERROR(STX_ERR_ARG, "SentencePiece");
    stx_vocab_free(v);
    d = desc(STX_TOK_CHARS, STX_ORDER_FIRST);
    v = stx_vocab_build(x, &d, put_text("old", "ba\n"), 0, 0);
    EXPECT(!stx_vocab_grow(v, put_text("new", "a\xFF"), 0, 0, 0));
    ERROR(STX_ERR_FORMAT, "not UTF-8: byte 1");
    stx_vocab_free(v);
    FINE();
}

/* If a text is split into two adjacent ranges at any byte, the ranges must not overlap,
   and together they must contain the whole text. */
static void test_ranges(void) {
    static const char text[] =
        "\xC3\xA4pfel b\xC3\xA4ume\r\n\xE2\x82\xAC 12\xE3\x80\x80x \n\n\xF0\x9F\x98\x80 end\rz";
    size_t n = sizeof text - 1, at;
    int kind;
    const char *path = put_text("ranges", text);
    for (kind = STX_TOK_BYTES; kind <= STX_TOK_WORDS; kind++) {
        stx_vocab_desc d = desc(kind, STX_ORDER_FIRST);
        stx_vocab *v = stx_vocab_build(x, &d, path, 0, 0);
        stx_corpus *whole = stx_corpus_open(x, v, path, 0, 0);
        size_t total = stx_corpus_size(whole);
        for (at = 1; at < n; at++) {
            stx_corpus *a = stx_corpus_open(x, v, path, 0, at), *b;
            size_t na, nb, i, k = 0, wrong = 0;
            FINE();
            b = stx_corpus_open(x, v, path, at, 0);
            if (!b) {
                stx_clear_error(x);
                EXPECT(at + 4 > n || kind == STX_TOK_WORDS);
            }
            na = stx_corpus_size(a);
            nb = stx_corpus_size(b);
            EXPECT(stx_corpus_bytes(a) + stx_corpus_bytes(b) == n);
            if (kind != STX_TOK_WORDS) EXPECT(na + nb == total);
            /* with words, splitting a line adds an <eos> */
            for (i = 0; i < na + nb; i++) {
                int32_t p = -1, q = -2;
                if (i < na)
                    stx_corpus_read(a, i, 1, &p);
                else
                    stx_corpus_read(b, i - na, 1, &p);
                if (k < total) stx_corpus_read(whole, k, 1, &q);
                if (p == q)
                    k++;
                else if (kind != STX_TOK_WORDS || i != na - 1 || p != stx_vocab_eos(v))
                    wrong++;
            }
            EXPECT(wrong == 0 && k == total);
            FINE();
            stx_corpus_close(a);
            stx_corpus_close(b);
        }
        stx_corpus_close(whole);
        stx_vocab_free(v);
    }
}

/* Tests a stored vocabulary: its round trip, every truncation, and every flipped bit. */
static void check_blob(const stx_vocab_desc *d, const char *path) {
    stx_vocab *v = stx_vocab_build(x, d, path, 0, 0), *u;
    size_t n = stx_vocab_save(v, NULL, 0), j;
    unsigned char *blob = (unsigned char *)malloc(n + 1);
    unsigned char *again = (unsigned char *)malloc(n + 1);
    stx_corpus *a, *b;
    char ids[4096];
    int bit;
    blob[0] = 'q';
    EXPECT(stx_vocab_save(v, blob, n - 1) == n && blob[0] == 'q');
    EXPECT(stx_vocab_save(v, blob, n) == n);
    u = stx_vocab_load(x, blob, n);
    FINE();
    EXPECT(stx_vocab_save(u, again, n) == n && !memcmp(blob, again, n));
    EXPECT(stx_vocab_kind(u) == d->kind && stx_vocab_size(u) == stx_vocab_size(v));
    EXPECT(stx_vocab_eos(u) == stx_vocab_eos(v) && stx_vocab_unk(u) == stx_vocab_unk(v));
    a = stx_corpus_open(x, v, path, 0, 0);
    b = stx_corpus_open(x, u, path, 0, 0);
    FINE();
    strcpy(ids, tokens(v, a));
    SAME(tokens(u, b), ids);
    stx_corpus_close(a);
    stx_corpus_close(b);
    stx_vocab_free(u);

    blob[n] = 0;
    for (j = 0; j < n; j++) {
        EXPECT(!stx_vocab_load(x, blob, j));
        ERROR(STX_ERR_FORMAT, "stored vocabulary");
    }
    EXPECT(!stx_vocab_load(x, blob, n + 1));
    ERROR(STX_ERR_FORMAT, "stored vocabulary");
    for (j = 0; j < n; j++)
        for (bit = 0; bit < 8; bit++) { /* if the vocabulary can be loaded, saving it must
                                           write the same bytes */
            blob[j] ^= (unsigned char)(1 << bit);
            u = stx_vocab_load(x, blob, n);
            if (u)
                EXPECT(stx_vocab_save(u, again, n) == n && !memcmp(blob, again, n));
            else
                EXPECT(stx_error_code(x) == STX_ERR_FORMAT);
            stx_clear_error(x);
            stx_vocab_free(u);
            blob[j] ^= (unsigned char)(1 << bit);
        }
    free(blob);
    free(again);
    stx_vocab_free(v);
}

static void test_blob(void) {
    static const struct {
        int kind, compact, eos;
        uint64_t min_count;
        const char *text;
    } k[] = {{STX_TOK_BYTES, 0, 0, 0, "x"},
             {STX_TOK_BYTES, 1, 0, 0, "abc\nde"},
             {STX_TOK_BYTES, 1, 0, 2, "aab\n"},
             {STX_TOK_CHARS, 0, 0, 0, "a\xC3\xA4\n\r"},
             {STX_TOK_CHARS, 0, 1, 2, "aa\xC3\xA4\n"},
             {STX_TOK_WORDS, 0, 0, 0, "a bb ccc\n"},
             {STX_TOK_IDS, 0, 0, 0, "1 0 2\n"}};
    size_t i;
    for (i = 0; i < sizeof k / sizeof *k; i++) {
        stx_vocab_desc d = desc(k[i].kind, STX_ORDER_FIRST);
        d.compact = k[i].compact;
        d.eos = k[i].eos;
        d.min_count = k[i].min_count;
        if (d.kind == STX_TOK_IDS)
            d.pieces = put_text("list.vocab", "</s>\t0\n<0x09>\t0\n\xe2\x96\x81"
                                              "a\t-1\n");
        check_blob(&d, put_text("train", k[i].text));
    }
    EXPECT(!stx_vocab_load(x, NULL, 0));
    ERROR(STX_ERR_FORMAT, "expected a stored vocabulary");
}

/* Damaged vocabularies must be refused: a huge V, an empty piece, a repeated piece. */
static void test_bad_blob(void) {
    unsigned char b[64] = "STXV\1\2\2\0\2\0\0\0\0\0\0\0\1\0\0\0a\1\0\0\0b";
    stx_vocab *v = stx_vocab_load(x, b, 26);
    EXPECT(v != NULL && stx_vocab_size(v) == 2);
    stx_vocab_free(v);
    b[25] = 'a';
    EXPECT(!stx_vocab_load(x, b, 26));
    ERROR(STX_ERR_FORMAT, "the same piece twice");
    b[25] = ' ';
    EXPECT(!stx_vocab_load(x, b, 26));
    ERROR(STX_ERR_FORMAT, "a piece that is invalid for its kind");
    b[25] = 'b';
    b[15] = 0x80;
    EXPECT(!stx_vocab_load(x, b, 26));
    ERROR(STX_ERR_FORMAT, "size");
    b[15] = 0;
    b[24] = 0xFF;
    EXPECT(!stx_vocab_load(x, b, 26));
    ERROR(STX_ERR_FORMAT, "truncated");
    b[24] = 0;
    b[21] = 0;
    EXPECT(!stx_vocab_load(x, b, 26));
    ERROR(STX_ERR_FORMAT, "a piece that is invalid for its kind");
}

/* A vocabulary must be able to have more than 65,536 words. */
static void test_large_vocab(void) {
    stx_vocab_desc d = desc(STX_TOK_WORDS, STX_ORDER_COUNT_LATER);
    FILE *f = fopen(in_dir("large"), "wb");
    stx_vocab *v;
    stx_corpus *c;
    int32_t id[3];
    size_t i, wrong = 0;
    for (i = 0; i < 70000; i++) fprintf(f, "w%u%c", (unsigned)i, i % 10 == 9 ? '\n' : ' ');
    fclose(f);
    v = stx_vocab_build(x, &d, in_dir("large"), 0, 0);
    c = stx_corpus_open(x, v, in_dir("large"), 0, 0);
    FINE();
    EXPECT(stx_vocab_size(v) == 70001 && stx_vocab_eos(v) == 0 && stx_corpus_size(c) == 77000);
    /* All counts are 1, so the last word comes first. */
    for (i = 0; i < 7000; i++) {
        wrong += !stx_corpus_read(c, i * 11, 1, id) || id[0] != (int32_t)(70000 - i * 10);
        wrong += !stx_corpus_read(c, i * 11 + 10, 1, id) || id[0] != 0;
    }
    EXPECT(wrong == 0);
    stx_corpus_close(c);
    stx_vocab_free(v);
    remove(in_dir("large"));
}

/* Files larger than 4 GiB must be readable. */
static void test_sparse(void) {
#if !defined(SEQTX_STDIO_FILES)
    const char *path = in_dir("sparse");
    uint64_t size = ((uint64_t)5 << 30) + 3, place = ((uint64_t)4 << 30) + 77;
    struct stat st;
    stx_vocab *v;
    stx_corpus *c;
    stx_batches *b;
    stx_batches_desc bd;
    stx_batches_state s;
    int32_t id[8], y[8];
    int fd, made;
    if (sizeof(size_t) < 8 || sizeof(off_t) < 8) {
        skip("a file of 5 GiB (32 bits)");
        return;
    }
    fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    made = fd >= 0 && ftruncate(fd, (off_t)size) == 0 && pwrite(fd, "seq", 3, (off_t)place) == 3
           && pwrite(fd, "!", 1, (off_t)size - 1) == 1;
    if (fd >= 0) close(fd);
    if (!made || stat(path, &st) != 0 || st.st_blocks > 4096) {
        skip("a file of 5 GiB (no sparse files)");
        remove(path);
        return;
    }
    v = stx_vocab_build(x, NULL, NULL, 0, 0);
    c = stx_corpus_open(x, v, path, 0, 0);
    FINE();
    EXPECT(stx_corpus_size(c) == size && stx_corpus_bytes(c) == size);
    EXPECT(stx_corpus_read(c, (size_t)place - 1, 5, id) && id[0] == 0 && id[1] == 's'
           && id[3] == 'q' && id[4] == 0);
    EXPECT(stx_corpus_read(c, (size_t)size - 1, 1, id) && id[0] == '!');
    memset(&bd, 0, sizeof bd);
    bd.B = 1;
    bd.T = 4;
    b = stx_batches_create(x, c, &bd);
    memset(&s, 0, sizeof s);
    s.p = place - 1;
    EXPECT(stx_batches_set(b, s) && stx_batches_next(b, id, y) == STX_BATCH_OK && id[1] == 's'
           && y[0] == 's' && y[2] == 'q');
    EXPECT(stx_batches_get(b).p == place + 3);
    stx_batches_free(b);
    stx_corpus_close(c);
    c = stx_corpus_open(x, v, path, place, place + 3);
    EXPECT(stx_corpus_size(c) == 3 && stx_corpus_read(c, 0, 3, id) && id[2] == 'q');
    stx_corpus_close(c);
    stx_vocab_free(v);
    remove(path);
    FINE();
#else
    skip("a file of 5 GiB (no mmap)");
#endif
}


// >>batches

static int32_t ramp[2000];

static stx_corpus *ramp_corpus(size_t n) {
    size_t i;
    for (i = 0; i < n; i++) ramp[i] = (int32_t)i;
    return stx_corpus_wrap(x, ramp, n, n);
}

/* Compares 200 batches of B streams and T tokens with a second implementation of the
   batching rule. A second object, which is resumed at step 57, must return the same
   batches. */
static void check_batches(size_t N, size_t B, size_t T, uint64_t seed) {
    size_t n = N / B, p = 0, wrong = 0, i, r, t;
    uint64_t wraps = 0;
    int fresh = 1;
    stx_corpus *c = ramp_corpus(N);
    stx_batches_desc d;
    stx_batches *b, *resumed = NULL;
    int32_t X[128], Y[128], X2[128], Y2[128];
    memset(&d, 0, sizeof d);
    d.B = B;
    d.T = T;
    d.seed = seed;
    b = stx_batches_create(x, c, &d);
    FINE();
    EXPECT(stx_batches_rows(b) == B && stx_batches_stream(b) == n);
    for (i = 0; i < 200; i++) {
        stx_batches_state s = stx_batches_get(b);
        int got;
        wrong += s.p != p || s.wraps != wraps || s.fresh != fresh;
        if (i == 57) {
            resumed = stx_batches_create(x, c, &d);
            EXPECT(stx_batches_set(resumed, s));
        }
        got = stx_batches_next(b, X, Y);
        wrong += got != (fresh ? STX_BATCH_FRESH : STX_BATCH_OK);
        for (r = 0; r < B; r++)
            for (t = 0; t < T; t++)
                wrong += X[r * T + t] != (int32_t)(r * n + p + t)
                         || Y[r * T + t] != (int32_t)(r * n + p + t + 1);
        if (resumed) {
            wrong += stx_batches_next(resumed, X2, Y2) != got;
            wrong += memcmp(X, X2, B * T * sizeof *X) != 0 || memcmp(Y, Y2, B * T * sizeof *Y) != 0;
        }
        fresh = 0;
        p += T;
        if (p >= n - T) {
            uint32_t u[4];
            wraps++;
            stx_philox(d.seed ^ 0x6261746368657321u, 0, wraps, u);
            p = (size_t)((u[0] | (uint64_t)u[1] << 32) % (T < n - T ? T : n - T));
            fresh = 1;
        }
    }
    EXPECT(wrong == 0);
    FINE();
    stx_batches_free(b);
    stx_batches_free(resumed);
    stx_corpus_close(c);
}

static void test_batches(void) {
    static const size_t shapes[][3] = {{103, 3, 5},  {40, 4, 3}, {8, 2, 3}, {2, 1, 1},
                                       {300, 7, 13}, {26, 2, 7}, {24, 3, 7}};
    size_t k;
    for (k = 0; k < sizeof shapes / sizeof *shapes; k++)
        check_batches(shapes[k][0], shapes[k][1], shapes[k][2], 1234 + k);
}

/* After a wrap, positions must be spread over [0, T) and depend on the seed. */
static void test_wraps(void) {
    stx_corpus *c = ramp_corpus(100);
    stx_batches_desc d;
    int seen[10], used = 0, i;
    uint64_t seed;
    memset(seen, 0, sizeof seen);
    memset(&d, 0, sizeof d);
    d.B = 4;
    d.T = 10;
    for (seed = 0; seed < 300; seed++) {
        int32_t X[40], Y[40];
        stx_batches *b;
        d.seed = seed;
        b = stx_batches_create(x, c, &d);
        EXPECT(stx_batches_next(b, X, Y) == STX_BATCH_FRESH
               && stx_batches_next(b, X, Y) == STX_BATCH_OK);
        EXPECT(stx_batches_get(b).p < 10 && stx_batches_get(b).wraps == 1
               && stx_batches_get(b).fresh == 1);
        seen[stx_batches_get(b).p % 10]++;
        stx_batches_free(b);
    }
    for (i = 0; i < 10; i++) used += seen[i] > 10 && seen[i] < 60;
    EXPECT(used == 10);
    stx_corpus_close(c);
}

/* Compares three epochs of records with a second implementation of the record rule:
   blocks of T + 1 tokens do not overlap, and row b of record q is block number q + b *
   stride. */
static void check_records(size_t first, size_t N, size_t B, size_t T) {
    size_t S = T + 1, blocks = N / S, stride = N / (B * S), records = stride + blocks - B * stride;
    size_t i, q, r, t, n, wrong = 0;
    stx_corpus *c = ramp_corpus(N + first);
    stx_batches_desc d;
    stx_batches *b, *resumed = NULL;
    int32_t X[128], Y[128], X2[128], Y2[128];
    memset(&d, 0, sizeof d);
    d.B = B;
    d.T = T;
    d.how = STX_BATCH_RECORDS;
    d.first = first;
    d.count = first ? N : 0;
    b = stx_batches_create(x, c, &d);
    FINE();
    EXPECT(stx_batches_epoch(c, &d) == records && stx_batches_stream(b) == records * T);
    for (i = 0; i < 3 * records; i++) {
        int got;
        q = i % records;
        if (i == records / 2 + 1) {
            resumed = stx_batches_create(x, c, &d);
            EXPECT(stx_batches_set(resumed, stx_batches_get(b)));
        }
        got = stx_batches_next(b, X, Y);
        wrong += got != (q ? STX_BATCH_OK : STX_BATCH_FRESH);
        for (r = 0; r < B; r++)
            for (t = 0; t < T; t++) {
                size_t at = first + (q + r * stride) * S + t;
                wrong += X[r * T + t] != (int32_t)at || Y[r * T + t] != (int32_t)at + 1;
            }
        if (resumed)
            wrong += stx_batches_next(resumed, X2, Y2) != got
                     || memcmp(X, X2, B * T * sizeof *X) != 0
                     || memcmp(Y, Y2, B * T * sizeof *Y) != 0;
    }
    EXPECT(wrong == 0 && stx_batches_get(b).wraps == 3 && stx_batches_get(b).fresh);
    stx_batches_rewind(b, STX_EVAL_ALL);
    for (q = wrong = 0; stx_batches_next_eval(b, X, Y, &n) != STX_BATCH_END; q++)
        for (r = 0; r < B; r++)
            wrong += n != T || Y[r * T + T - 1] != (int32_t)(first + (q + r * stride) * S + T);
    EXPECT(q == records && wrong == 0);
    if (records > 1) {
        stx_batches_state s = stx_batches_get(b);
        s.p = T;
        s.fresh = 1;
        EXPECT(!stx_batches_set(b, s));
        ERROR(STX_ERR_ARG, "position");
    }
    FINE();
    stx_batches_free(b);
    stx_batches_free(resumed);
    stx_corpus_close(c);
}

static void test_records(void) {
    static const size_t shapes[][3] = {{103, 3, 5}, {40, 4, 3},   {8, 2, 3},
                                       {2, 1, 1},   {300, 7, 13}, {83, 4, 2}};
    /* Token and record counts for WikiText-2, tokenised with the original code's
       pieces, and for a minimal corpus. */
    static const size_t size[3][2] = {{314913, 304}, {357981, 369}, {33 * 32, 1}};
    static int32_t one[1];
    size_t k;
    for (k = 0; k < sizeof shapes / sizeof *shapes; k++)
        check_records(k % 2 * 50, shapes[k][0], shapes[k][1], shapes[k][2]);
    for (k = 0; k < 3; k++) {
        stx_corpus *c = stx_corpus_wrap(x, one, size[k][0], 1);
        stx_batches_desc d;
        memset(&d, 0, sizeof d);
        d.B = d.T = 32;
        d.how = STX_BATCH_RECORDS;
        EXPECT(stx_batches_epoch(c, &d) == size[k][1]);
        stx_corpus_close(c);
    }
    EXPECT(stx_batches_epoch(NULL, NULL) == 0);
}

/* With rolled streams, every epoch and every stream must start at a different position,
   and a stream must continue at its beginning after its end. */
static void test_roll(void) {
    size_t N = 211, B = 3, T = 7, n = N / B, i, r, t, wrong = 0, differ = 0, blocks;
    stx_corpus *c = ramp_corpus(N);
    stx_batches_desc d;
    stx_batches *b, *resumed = NULL;
    int32_t X[21], Y[21], X2[21], Y2[21], start[3] = {0, 0, 0}, before[3] = {-1, -1, -1};
    memset(&d, 0, sizeof d);
    d.B = B;
    d.T = T;
    d.seed = 5;
    d.how = STX_BATCH_ROLL;
    blocks = stx_batches_epoch(c, &d);
    EXPECT(blocks == (n - T + T - 1) / T);
    b = stx_batches_create(x, c, &d);
    for (i = 0; i < 6 * blocks; i++) {
        if (i == blocks + 3) {
            resumed = stx_batches_create(x, c, &d);
            EXPECT(stx_batches_set(resumed, stx_batches_get(b)));
        }
        EXPECT(stx_batches_next(b, X, Y) == (i % blocks ? STX_BATCH_OK : STX_BATCH_FRESH));
        for (r = 0; r < B; r++) {
            if (i % blocks == 0) {
                start[r] = X[r * T] - (int32_t)(r * n);
                differ += start[r] != before[r];
                before[r] = start[r];
            }
            for (t = 0; t < T; t++) {
                size_t at = ((size_t)start[r] + i % blocks * T + t) % n;
                wrong += X[r * T + t] != (int32_t)(r * n + at)
                         || Y[r * T + t] != (int32_t)(r * n + (at + 1) % n);
            }
        }
        if (resumed) {
            stx_batches_next(resumed, X2, Y2);
            wrong += memcmp(X, X2, sizeof X) != 0 || memcmp(Y, Y2, sizeof Y) != 0;
        }
    }
    EXPECT(wrong == 0 && differ > 14 && start[0] != start[1] && start[1] != start[2]);
    stx_batches_rewind(b, STX_EVAL_ALL);
    EXPECT(stx_batches_next_eval(b, X, Y, &t) == STX_BATCH_FRESH && X[0] == 0
           && X[T] == (int32_t)n);
    d.first = N + 1;
    EXPECT(!stx_batches_create(x, c, &d));
    ERROR(STX_ERR_ARG, "first, count: expected");
    d.first = 5;
    d.count = N - 4;
    EXPECT(!stx_batches_create(x, c, &d));
    ERROR(STX_ERR_ARG, "first, count: expected");
    d.count = 23;
    EXPECT(!stx_batches_create(x, c, &d));
    ERROR(STX_ERR_ARG, "the data are too short: 23 tokens");
    d.how = 3;
    EXPECT(!stx_batches_create(x, c, &d));
    ERROR(STX_ERR_ARG, "how = 3");
    stx_batches_free(b);
    stx_batches_free(resumed);
    stx_corpus_close(c);
}

/* Piece ids must decode to text: U+2581 is a blank, a control piece is empty, and a
   byte piece is a byte. */
static void test_ids(void) {
    static const char list[] = "[PAD]\t0\n[BOS]\t0\n[EOS]\t0\n[UNK]\t0\n@-@\t0\n"
                               "\xe2\x96\x81the\t-1.5\n\xe2\x96\x81"
                               "cat\t-2\n<0x41>\t-3\ns\t-4\r\n";
    stx_vocab_desc d = desc(STX_TOK_IDS, STX_ORDER_FIRST);
    const char *path = put_text("train", "5 6 8\n2\t5\r\n 4 6 7 3 0 5");
    stx_vocab *v, *u;
    stx_corpus *c;
    int32_t id[16];
    char text[64];
    unsigned char blob[512];
    size_t n;
    d.pieces = put_text("list.vocab", list);
    v = stx_vocab_build(x, &d, NULL, 0, 0);
    FINE();
    EXPECT(stx_vocab_size(v) == 9 && stx_vocab_eos(v) == 2 && stx_vocab_unk(v) == 3
           && stx_vocab_find(v, "s", 1) == 8);
    c = stx_corpus_open(x, v, path, 0, 0);
    FINE();
    EXPECT(stx_corpus_size(c) == 11 && stx_corpus_read(c, 0, 11, id) && id[3] == 2 && id[10] == 5);
    n = stx_vocab_decode(v, id, 11, text, sizeof text);
    EXPECT(n == 31 && stx_corpus_bytes(c) == 31);
    text[n < sizeof text ? n : 0] = 0;
    SAME(text, " the cats\n the@-@ catA \xe2\x81\x87  the");
    EXPECT(stx_vocab_encode(v, "8 0", 3, id, 16) == 2 && id[0] == 8 && id[1] == 0);
    EXPECT(stx_vocab_encode(v, "8 9", 3, id, 16) == STX_NPOS);
    ERROR(STX_ERR_FORMAT, "expected piece ids from 0 to 8, separated by white space, got '9' at "
                          "byte 2");
    EXPECT(stx_vocab_encode(v, "x", 1, id, 16) == STX_NPOS);
    ERROR(STX_ERR_FORMAT, "got 'x' at byte 0");
    EXPECT(stx_vocab_encode(v, "99999999999999999999", 20, id, 16) == STX_NPOS);
    ERROR(STX_ERR_FORMAT, "expected piece ids from 0 to 8");
    n = stx_vocab_save(v, blob, sizeof blob);
    u = n <= sizeof blob ? stx_vocab_load(x, blob, n) : NULL;
    FINE();
    EXPECT(stx_vocab_kind(u) == STX_TOK_IDS && stx_vocab_eos(u) == 2
           && stx_vocab_decode(u, id, 1, text, sizeof text) == 1);
    stx_vocab_free(u);
    blob[n - 17] = STX_PIECE_BYTE; /* the last piece, "s", is not a byte piece */
    EXPECT(!stx_vocab_load(x, blob, n));
    ERROR(STX_ERR_FORMAT, "a piece that is invalid for its kind");
    blob[n - 17] = STX_PIECE_TEXT;
    blob[n - 16] = 10;
    EXPECT(!stx_vocab_load(x, blob, n));
    ERROR(STX_ERR_FORMAT, "a piece that it does not have");
    stx_corpus_close(c);
    stx_vocab_free(v);
}

static void test_pieces_errors(void) {
    stx_vocab_desc d = desc(STX_TOK_IDS, STX_ORDER_FIRST);
    EXPECT(!stx_vocab_build(x, &d, NULL, 0, 0));
    ERROR(STX_ERR_ARG, "expected a .vocab file (--pieces)");
    d.pieces = put_text("list.vocab", "a\t1\nb\t2\na\t3\n");
    EXPECT(!stx_vocab_build(x, &d, NULL, 0, 0));
    ERROR(STX_ERR_FORMAT, "the same piece twice");
    d.pieces = put_text("list.vocab", "a\n\nb\n");
    EXPECT(!stx_vocab_build(x, &d, NULL, 0, 0));
    ERROR(STX_ERR_FORMAT, "line 2 has no piece");
    d.pieces = in_dir("no such file");
    EXPECT(!stx_vocab_build(x, &d, NULL, 0, 0));
    ERROR(STX_ERR_IO, "no such file");
    d.kind = STX_TOK_PIECES;
    d.pieces = in_dir("list.vocab");
    EXPECT(!stx_vocab_build(x, &d, NULL, 0, 0));
#ifndef SEQTX_SENTENCEPIECE
    ERROR(STX_ERR_ARG,
          "this build has no SentencePiece library; rebuild with make SENTENCEPIECE=1");
#else
    ERROR(STX_ERR_FORMAT, "is not a SentencePiece model");
#endif
}

/* Writes a .vocab file of n pieces, with scores unless `score` is NULL. It must be read
   as these pieces or, if `error` is not NULL, refused with this error. */
static void check_list(const char *mark, const char *const *piece, const char *const *score,
                       size_t n, const char *error) {
    stx_vocab_desc d = desc(STX_TOK_IDS, STX_ORDER_FIRST);
    char list[600];
    stx_vocab *v;
    size_t i, at = (size_t)snprintf(list, sizeof list, "%s", mark);
    for (i = 0; i < n; i++)
        at += (size_t)snprintf(list + at, sizeof list - at, "%s%s%s\n", piece[i], score ? "\t" : "",
                               score ? score[i] : "");
    d.pieces = put_text("list.vocab", list);
    v = stx_vocab_build(x, &d, NULL, 0, 0);
    if (error) {
        EXPECT(!v);
        ERROR(STX_ERR_FORMAT, error);
        return;
    }
    FINE();
    EXPECT(stx_vocab_size(v) == n);
    for (i = 0; v && i < n; i++) {
        size_t len = 0;
        const char *got = stx_vocab_piece(v, (int32_t)i, &len);
        EXPECT(got && len == strlen(piece[i]) && !memcmp(got, piece[i], len));
        EXPECT(stx_vocab_find(v, piece[i], len) == (int32_t)i);
    }
    stx_vocab_free(v);
}

/* Pieces may contain tabs and newlines, which SentencePiece writes unescaped. */
static void test_lists(void) {
    static const char *const tabs[] = {"<unk>",
                                       "\t",
                                       "a\tb",
                                       "\t\t",
                                       "a\t",
                                       "\tb",
                                       ("\xe2\x96\x81"
                                        "1\t2"),
                                       "b"};
    static const char *const ends[] = {"<unk>", "\n",   "\n\n",   "a\n", "\nb", "\r",
                                       "\n\t",  "\t\n", "c\n\nd", " ",   "e"};
    static const char *const score[] = {"0",  "0",     "-1.5", "-2e-05", "3", "-4",
                                        "-5", "1e+10", "-6",   "-7",     "-8"};
    static const char *const plain[] = {"a", " b", "c d", "\xe2\x96\x81"};
    static const char *const counts[] = {"1", "two", "3\t4", "x"};
    static const char *const split[] = {"a", "b\nc", "d"}; /* the newline splits piece 1 */
    static const char *const none[] = {"a", "", "d"};
    const char *const marks[2] = {"", "\xEF\xBB\xBF"};
    size_t i;
    for (i = 0; i < 2; i++) {
        check_list(marks[i], tabs, score, sizeof tabs / sizeof *tabs, NULL);
        check_list(marks[i], ends, score, sizeof ends / sizeof *ends, NULL);
        check_list(marks[i], plain, NULL, 4, NULL);
        check_list(marks[i], plain, counts, 4, NULL);
        check_list(marks[i], split, score, 3, "line 2 has no score after a tab");
        check_list(marks[i], none, score, 3, "line 2 has no piece");
        check_list(marks[i], plain, score, 0, "empty");
    }
}

/* Tests a text of one letter, blanks and newlines, with code units of 2 or 4 bytes,
   with and without a byte-order mark. */
static void wide_text(int kind, const stx_vocab *v, const char *name, size_t unit, int big,
                      int mark, const unsigned char letter[2]) {
    stx_vocab_desc d = desc(kind, STX_ORDER_FIRST);
    unsigned char bytes[4 * 64];
    char part[80];
    const char *path, *found;
    stx_corpus *c;
    size_t i, at = 0;
    memset(bytes, 0, sizeof bytes);
    for (i = 0; i < 60; i++, at += unit) {
        unsigned char *u = bytes + at, high = letter[0], low = letter[1];
        if (i % 8 == 7) {
            high = 0;
            low = i % 16 == 7 ? ' ' : '\n';
        }
        if (mark && !i) {
            high = 0xFE;
            low = 0xFF;
        }
        u[big ? unit - 2 : 1] = high;
        u[big ? unit - 1 : 0] = low;
    }
    path = put_bytes("wide", bytes, at);
    found = stx_text_encoding(bytes, at);
    EXPECT(found && strlen(found) == (mark ? 6 : 8) && !strncmp(found, name, strlen(found)));
    if (kind == STX_TOK_BYTES) {
        c = stx_corpus_open(x, v, path, 0, 0);
        FINE();
        EXPECT(stx_corpus_size(c) == at);
        EXPECT(stx_vocab_encode(v, (const char *)bytes, at, NULL, 0) == at);
        stx_corpus_close(c);
        return;
    }
    snprintf(part, sizeof part, "is %s, not UTF-8; convert it: iconv -f %s -t UTF-8", found,
             found);
    EXPECT(!stx_corpus_open(x, v, path, 0, 0));
    ERROR(STX_ERR_FORMAT, part);
    EXPECT(!stx_corpus_open(x, v, path, at / 2, at));
    ERROR(STX_ERR_FORMAT, part);
    EXPECT(stx_vocab_encode(v, (const char *)bytes, at, NULL, 0) == STX_NPOS);
    ERROR(STX_ERR_FORMAT, part);
    d.pieces = path;
    EXPECT(!stx_vocab_build(x, &d, path, 0, 0));
    ERROR(STX_ERR_FORMAT, part);
}

/* A byte-order mark must be skipped, and text with wider code units must be refused,
   except with STX_TOK_BYTES. */
static void test_marks(void) {
    static const char text[] = "\xEF\xBB\xBF"
                               "5 6 5\n6 5 5\n",
                      list[] = "a\nb\nc\nd\ne\nf\ng\n";
    static const char *const name[] = {"UTF-16LE", "UTF-16BE", "UTF-32LE", "UTF-32BE"};
    /* U+0061, U+0430, U+3042 */
    static const unsigned char script[3][2] = {{0, 'a'}, {4, 0x30}, {0x30, 0x42}};
    stx_vocab *v, *plain;
    stx_corpus *c;
    int32_t a[32], b[32];
    int kind;
    for (kind = STX_TOK_BYTES; kind <= STX_TOK_IDS; kind++) {
        stx_vocab_desc d = desc(kind, STX_ORDER_FIRST);
        const char *path, *without;
        size_t n, m, i;
        if (kind == STX_TOK_PIECES) continue; /* uses the same reader as words, but
                                                 requires a library */
        d.pieces = put_text("list.vocab", list);
        path = put_text("marked", text);
        without = put_text("unmarked", text + 3);
        v = stx_vocab_build(x, &d, path, 0, 0);
        plain = stx_vocab_build(x, &d, without, 0, 0);
        c = stx_corpus_open(x, v, path, 0, 0);
        FINE();
        EXPECT(stx_vocab_size(v) == stx_vocab_size(plain));
        n = kind == STX_TOK_IDS ? 6 : 12;
        EXPECT(stx_corpus_bytes(c) == (kind == STX_TOK_BYTES ? 15 : n));
        n = stx_corpus_size(c);
        EXPECT(n < 32 && stx_corpus_read(c, 0, n < 32 ? n : 0, a));
        stx_corpus_close(c);
        m = stx_vocab_encode(v, text, sizeof text - 1, b, 32);
        EXPECT(m == n && !memcmp(a, b, n * sizeof *a));
        m = stx_vocab_encode(plain, text + 3, sizeof text - 4, b, 32);
        EXPECT(m + (kind == STX_TOK_BYTES ? 3 : 0) == n && !memcmp(a + (n - m), b, m * sizeof *a));
        EXPECT(stx_vocab_encode(v, text, 3, b, 32) == (kind == STX_TOK_BYTES ? 3u : 0u));
        FINE();
        if (kind == STX_TOK_CHARS) { /* a range that starts inside the mark */
            for (i = 1; i < 5; i++) {
                c = stx_corpus_open(x, plain, path, i, 0);
                EXPECT(c && stx_corpus_read(c, 0, 1, a) && (i > 3 || a[0] == b[0]));
                stx_corpus_close(c);
            }
            EXPECT(!stx_corpus_open(x, plain, path, 0, 2));
            ERROR(STX_ERR_FORMAT, "no text between");
        }
        for (i = 0; i < 4 * 2 * 3; i++) {
            wide_text(kind, v, name[i % 4], i % 4 < 2 ? 2 : 4, (int)(i % 2), (int)(i / 4 % 2),
                      script[i / 8]);
        }
        stx_vocab_free(v);
        stx_vocab_free(plain);
    }
    /* In a range that does not start at the beginning of a text, U+FEFF is a character,
       and the encoding is not checked. */
    {
        stx_vocab_desc d = desc(STX_TOK_CHARS, STX_ORDER_FIRST);
        v = stx_vocab_build(x, &d, put_text("joined", "a\xEF\xBB\xBF"), 0, 0);
        EXPECT(stx_vocab_encode_part(v, "\xEF\xBB\xBF" "a", 4, a, 32) == 2 && a[0] == 1);
        EXPECT(a[1] == 0);
        EXPECT(stx_vocab_encode(v, "\xEF\xBB\xBF" "a", 4, a, 32) == 1 && a[0] == 0);
        EXPECT(stx_vocab_encode_part(v, "", 0, NULL, 0) == 0);
        FINE();
        EXPECT(stx_vocab_encode_part(v, NULL, 5, a, 32) == STX_NPOS);
        ERROR(STX_ERR_ARG, "stx_vocab_encode_part: text: expected a buffer, got NULL");
        EXPECT(stx_vocab_encode_part(NULL, "a", 1, a, 32) == STX_NPOS);
        EXPECT(stx_vocab_encode_part(v, "\xFF\xFE" "a", 3, a, 32) == STX_NPOS);
        ERROR(STX_ERR_FORMAT, "is not UTF-8: byte 0");
        stx_vocab_free(v);
    }
    /* Japanese text in UTF-16, in which only the line end has a zero byte. Both byte
       orders and a surrogate pair must be recognised. Damaged variants must not be
       recognised. */
    EXPECT(!strcmp(stx_text_encoding("\xE5\x65\x2C\x67\x9E\x8A\x0A\0", 8), "UTF-16LE"));
    EXPECT(!strcmp(stx_text_encoding("\x65\xE5\x67\x2C\x8A\x9E\0\x0A", 8), "UTF-16BE"));
    EXPECT(!strcmp(stx_text_encoding("\x40\xD8\x0B\xDC\x9E\x8A\x0A\0", 8), "UTF-16LE"));
    EXPECT(!stx_text_encoding("\xE5\x65\x40\xD8\x9E\x8A\x0A\0", 8));
    EXPECT(!stx_text_encoding("\xE5\x65\0\x67\x9E\x8A\x0A\0", 8));
    EXPECT(!stx_text_encoding("\xE5\x65\x2C\x67\x9E\x8A\x01\0", 8));
    EXPECT(!stx_text_encoding("\xE5\x65\x2C\xE7\x9E\x8A\x0A\0", 8));
    EXPECT(!stx_text_encoding("\xE5\x65\x2C\x67\x9E\x8A\x0A\x41", 8));
    /* Not recognised as UTF-16 or UTF-32: UTF-8 in other scripts, texts with few zero
       bytes, zero bytes at irregular positions, and a single letter. */
    EXPECT(!stx_text_encoding("", 0) && !stx_text_encoding("a", 1));
    EXPECT(!stx_text_encoding("\0a", 2) && !stx_text_encoding("abc\0", 4));
    EXPECT(!stx_text_encoding("\xd0\xb0\xd0\xb1 \xd0\xb2", 7));
    EXPECT(!stx_text_encoding("\0\0\0\0\0\0\0\0", 8) && !stx_text_encoding("ab\0\0\0ab\0c", 9));
    EXPECT(!stx_text_encoding("\xEF\xBB\xBF"
                              "ab",
                              5));
}

/* Compares the evaluation rules with plain lists of targets, for B streams of n tokens
   and blocks of T tokens. The training position must not change. */
static void check_eval(size_t n, size_t B, size_t T) {
    stx_corpus *c = ramp_corpus(n * B + B - 1);
    stx_batches_desc d;
    stx_batches *b;
    int32_t X[128], Y[128];
    stx_batches_state before;
    int rule;
    memset(&d, 0, sizeof d);
    d.B = B;
    d.T = T;
    b = stx_batches_create(x, c, &d);
    EXPECT(stx_batches_next(b, X, Y) == STX_BATCH_FRESH);
    before = stx_batches_get(b);
    for (rule = STX_EVAL_ALL; rule <= STX_EVAL_LITERAL; rule++) {
        int scored[80], blocks = 0, wrong = 0, r;
        size_t t, i, row, last = n - 1;
        memset(scored, 0, sizeof scored);
        if (rule == STX_EVAL_LITERAL)
            for (last = T; last < n - T; last += T) {
            }
        stx_batches_rewind(b, rule);
        while ((r = stx_batches_next_eval(b, X, Y, &t)) != STX_BATCH_END) {
            wrong += r != (blocks ? STX_BATCH_OK : STX_BATCH_FRESH) || t == 0 || t > T;
            for (row = 0; row < B; row++)
                for (i = 0; i < t; i++) {
                    wrong += X[row * t + i] + 1 != Y[row * t + i];
                    scored[Y[row * t + i]]++;
                }
            blocks++;
        }
        wrong += t != 0;
        for (row = 0; row < B; row++)
            for (i = 0; i < n; i++) wrong += scored[row * n + i] != (i >= 1 && i <= last);
        EXPECT(wrong == 0);
        EXPECT(stx_batches_next_eval(b, X, Y, &t) == STX_BATCH_END && stx_ok(x));
    }
    EXPECT(before.p == stx_batches_get(b).p && before.wraps == stx_batches_get(b).wraps
           && before.fresh == stx_batches_get(b).fresh);
    stx_batches_free(b);
    stx_corpus_close(c);
}

static void test_eval(void) {
    size_t n, B, T;
    for (B = 1; B <= 3; B++)
        for (n = 2; n <= 23; n++)
            for (T = 1; T < n; T++) check_eval(n, B, T);
}

/* The test part of enwik8 must have 1220 blocks. */
static void test_eval_enwik8(void) {
    size_t t, n = 625000, blocks = 0;
    int32_t *all = (int32_t *)calloc(n, sizeof *all), *xy = (int32_t *)calloc(1024, sizeof *xy);
    stx_corpus *c = stx_corpus_wrap(x, all, n, n);
    stx_batches_desc d;
    stx_batches *b;
    memset(&d, 0, sizeof d);
    d.B = 1;
    d.T = 512;
    b = stx_batches_create(x, c, &d);
    stx_batches_rewind(b, STX_EVAL_LITERAL);
    while (stx_batches_next_eval(b, xy, xy + 512, &t)) blocks++;
    EXPECT(blocks == 1220);
    stx_batches_free(b);
    stx_corpus_close(c);
    free(all);
    free(xy);
}

/* Each rank must receive its own rows of the whole batch. */
static void test_ranks(void) {
    stx_corpus *c = ramp_corpus(500);
    stx_batches_desc d;
    stx_batches *all, *part[3];
    int32_t X[60], Y[60], x1[60], y1[60];
    size_t i, r, t, t1, wrong = 0;
    memset(&d, 0, sizeof d);
    d.B = 6;
    d.T = 10;
    d.seed = 5;
    all = stx_batches_create(x, c, &d);
    d.world = 3;
    for (r = 0; r < 3; r++) {
        d.rank = r;
        part[r] = stx_batches_create(x, c, &d);
        EXPECT(stx_batches_rows(part[r]) == 2);
    }
    for (i = 0; i < 50; i++) {
        int got = stx_batches_next(all, X, Y);
        for (r = 0; r < 3; r++) {
            wrong += stx_batches_next(part[r], x1, y1) != got;
            wrong += memcmp(x1, X + r * 20, 20 * sizeof *X) != 0
                     || memcmp(y1, Y + r * 20, 20 * sizeof *Y) != 0;
        }
    }
    stx_batches_rewind(all, STX_EVAL_ALL);
    for (r = 0; r < 3; r++) stx_batches_rewind(part[r], STX_EVAL_ALL);
    while (stx_batches_next_eval(all, X, Y, &t))
        for (r = 0; r < 3; r++) {
            wrong += !stx_batches_next_eval(part[r], x1, y1, &t1) || t1 != t;
            wrong += memcmp(x1, X + r * 2 * t, 2 * t * sizeof *X) != 0;
        }
    EXPECT(wrong == 0);
    FINE();
    for (r = 0; r < 3; r++) stx_batches_free(part[r]);
    stx_batches_free(all);
    stx_corpus_close(c);
}

static void test_batches_errors(void) {
    stx_corpus *c = ramp_corpus(100);
    stx_batches_desc d;
    stx_batches_state s;
    stx_batches *b;
    int32_t X[200];
    size_t t;
    memset(&d, 0, sizeof d);
    EXPECT(!stx_batches_create(x, c, NULL));
    ERROR(STX_ERR_ARG, "at least 1");
    EXPECT(!stx_batches_create(x, c, &d));
    ERROR(STX_ERR_ARG, "B = 0");
    d.B = 4;
    EXPECT(!stx_batches_create(x, c, &d));
    ERROR(STX_ERR_ARG, "T = 0");
    d.T = 25;
    EXPECT(!stx_batches_create(x, c, &d));
    ERROR(STX_ERR_ARG, "100 tokens, but 4 streams with blocks of 25 tokens need at least 104");
    d.T = 24;
    b = stx_batches_create(x, c, &d);
    FINE();
    EXPECT(stx_batches_next(b, X, X + 96) == STX_BATCH_FRESH
           && stx_batches_next(b, X, X + 96) == STX_BATCH_FRESH);
    EXPECT(!stx_batches_next(b, NULL, X));
    ERROR(STX_ERR_ARG, "NULL");
    EXPECT(!stx_batches_next_eval(b, X, X + 96, NULL));
    ERROR(STX_ERR_ARG, "NULL");
    stx_batches_rewind(b, 9);
    EXPECT(!stx_batches_next_eval(b, X, X + 96, &t) && t == 0);
    ERROR(STX_ERR_ARG, "STX_EVAL_LITERAL, got 9");
    stx_batches_free(b);
    d.T = (size_t)-1;
    EXPECT(!stx_batches_create(x, c, &d));
    ERROR(STX_ERR_ARG, "too short");
    d.T = 3;
    d.B = (size_t)-1;
    EXPECT(!stx_batches_create(x, c, &d));
    ERROR(STX_ERR_ARG, "too short");
    d.B = 4;
    d.world = 3;
    EXPECT(!stx_batches_create(x, c, &d));
    ERROR(STX_ERR_ARG, "multiple");
    d.world = 2;
    d.rank = 2;
    EXPECT(!stx_batches_create(x, c, &d));
    ERROR(STX_ERR_ARG, "rank 2 of 2");
    stx_corpus_close(c);
    EXPECT(!stx_corpus_wrap(x, NULL, 5, 5));
    ERROR(STX_ERR_ARG, "expected at least one token");
    EXPECT(!stx_corpus_wrap(x, ramp, 0, 5));
    ERROR(STX_ERR_ARG, "expected at least one token");
    memset(&s, 0, sizeof s);
    EXPECT(!stx_batches_create(x, NULL, &d) && stx_ok(x));
    EXPECT(!stx_batches_next(NULL, X, X) && !stx_batches_next_eval(NULL, X, X, &t)
           && stx_batches_get(NULL).p == 0 && !stx_batches_set(NULL, s));
    stx_batches_rewind(NULL, 0);
    stx_batches_free(NULL);
}

/* Positions that cannot occur must be refused. */
static void test_position_errors(void) {
    stx_corpus *c = ramp_corpus(100);
    stx_batches_desc d;
    stx_batches_state s;
    stx_batches *b;
    memset(&d, 0, sizeof d);
    d.B = 4;
    d.T = 3;
    b = stx_batches_create(x, c, &d);
    s = stx_batches_get(b);
    EXPECT(s.p == 0 && s.wraps == 0 && s.fresh == 1);
    s.p = 21;
    EXPECT(stx_batches_set(b, s));
    s.p = 22;
    EXPECT(!stx_batches_set(b, s));
    ERROR(STX_ERR_ARG, "position 22");
    s.p = UINT64_MAX;
    EXPECT(!stx_batches_set(b, s));
    ERROR(STX_ERR_ARG, "is impossible in streams of 25 tokens with blocks of 3");
    s.p = 2;
    s.fresh = 0;
    EXPECT(!stx_batches_set(b, s));
    ERROR(STX_ERR_ARG, "continued");
    s.fresh = 2;
    EXPECT(!stx_batches_set(b, s));
    ERROR(STX_ERR_ARG, "position 2");
    EXPECT(stx_batches_get(b).p == 21);
    stx_batches_free(b);
    stx_corpus_close(c);
}


// >>allocations: whenever one fails, there must be an error and no leak, and the old
// file must be intact

/* Calls all functions that allocate memory. Returns 0 if a call fails. */
static int everything(void) {
    stx_vocab_desc d = desc(STX_TOK_WORDS, STX_ORDER_COUNT_LATER);
    stx_batches_desc bd;
    float v[2] = {1, 2};
    double got[2];
    size_t two[1] = {2}, n = 0;
    int32_t X[4], Y[4];
    char name[16];
    int i, ok = 1;
    stx_writer *w = stx_writer_create(x);
    stx_vocab *voc, *again = NULL, *larger;
    stx_corpus *c, *c2;
    stx_batches *b;
    stx_file *f;
    unsigned char blob[4096];
    for (i = 0; i < 20; i++) {
        snprintf(name, sizeof name, "n%d", i);
        ok &= stx_writer_add(w, name, STX_F32, 1, two, v);
        ok &= stx_writer_meta(w, name, "value");
    }
    ok &= stx_writer_finish(w, in_dir("s/link"));
    f = stx_file_open(x, in_dir("s/link"));
    ok &= stx_entry_get_f64(stx_file_find(f, "n7"), got, 2);
    d.min_count = 2;
    voc = stx_vocab_build(x, &d, in_dir("words"), 0, 0);
    n = stx_vocab_save(voc, blob, sizeof blob);
    if (n) again = stx_vocab_load(x, blob, n);
    c = stx_corpus_open(x, again, in_dir("words"), 0, 0);
    larger = stx_vocab_grow(again, in_dir("train"), 0, 0, 2);
    ok &= larger != NULL;
    stx_vocab_free(larger);
    memset(&bd, 0, sizeof bd);
    bd.B = bd.T = 2;
    b = stx_batches_create(x, c, &bd);
    ok &= stx_batches_next(b, X, Y) == STX_BATCH_FRESH;
    stx_batches_free(b);
    stx_corpus_close(c);
    stx_vocab_free(voc);
    stx_vocab_free(again);
    voc = stx_vocab_build(x, NULL, NULL, 0, 0);
    n = stx_vocab_save(voc, blob, sizeof blob);
    again = n ? stx_vocab_load(x, blob, n) : NULL;
    c = stx_corpus_open(x, again, in_dir("words"), 0, 0);
    c2 = stx_corpus_wrap(x, X, 4, 4);
    ok &= again && c && c2;
    stx_corpus_close(c2);
    stx_corpus_close(c);
    stx_vocab_free(again);
    stx_vocab_free(voc);
    stx_file_close(f);
    return ok;
}

static void test_allocations(void) {
    FILE *f = fopen(in_dir("words"), "wb");
    long i, total, live = count.live;
    /* enough words for the tables to grow */
    for (i = 0; i < 700; i++) fprintf(f, "w%ld w%ld%c", i % 60, i, i % 7 ? ' ' : '\n');
    fclose(f);
    count.n = 0;
    EXPECT(everything());
    FINE();
    total = count.n;
    EXPECT(total > 50 && count.live == live);
    for (i = 0; i < total; i++) {
        count.n = 0;
        count.fail_at = i;
        EXPECT(!everything());
        count.fail_at = -1;
        EXPECT(stx_error_code(x) == STX_ERR_MEMORY);
        EXPECT(count.live == live);
        stx_clear_error(x);
        EXPECT(dir_entries(in_dir("r"), "file.") == 0);
    }
    EXPECT(everything());
    FINE();
}


// >>exchange with other programs

static int export_file(const char *path) {
    float f32[6] = {0.5f, -1, 2, 3, 4, 5};
    double f64[1] = {3.141592653589793};
    uint16_t bf16[2] = {0x3F80, 0xC040};
    int32_t i32[2] = {-5, 6};
    int64_t i64[2] = {-7, (int64_t)1 << 40};
    unsigned char u8[3] = {1, 2, 255};
    size_t d23[2] = {2, 3}, d2[1] = {2}, d3[1] = {3}, d0[2] = {0, 3};
    stx_writer *w = stx_writer_create(x);
    stx_writer_add(w, "u8", STX_U8, 1, d3, u8);
    stx_writer_add(w, "layer.0.w", STX_F32, 2, d23, f32);
    stx_writer_add(w, "scalar", STX_F64, 0, NULL, f64);
    stx_writer_add(w, "bf16", STX_BF16, 1, d2, bf16);
    stx_writer_add(w, "i32 \"\\\n\xC3\xA4", STX_I32, 1, d2, i32);
    stx_writer_add(w, "i64", STX_I64, 1, d2, i64);
    stx_writer_add(w, "empty", STX_F32, 2, d0, NULL);
    stx_writer_meta(w, "step", "12");
    stx_writer_meta(w, "text", "quote \" backslash \\ line\n\x01 \xE2\x82\xAC");
    return stx_writer_finish(w, path);
}

static int import_file(const char *path) {
    stx_file *f = stx_file_open(x, path);
    size_t i, k;
    for (i = 0; i < stx_file_count(f); i++) {
        const stx_entry *e = stx_file_entry(f, i);
        printf("%s %d [", e->name, e->dtype);
        for (k = 0; k < (size_t)e->ndim; k++) printf(k ? ",%zu" : "%zu", e->dim[k]);
        printf("]");
        for (k = 0; k < e->count && e->count <= 16; k++) {
            double v[16];
            int64_t n[16];
            if (e->kind[0] == 'B' ? e->dtype == STX_BOOL : e->kind[0] != 'F') {
                if (stx_entry_get_i64(e, n, e->count)) printf(" %lld", (long long)n[k]);
            } else if (stx_entry_get_f64(e, v, e->count))
                printf(" %.17g", v[k]);
        }
        printf("\n");
    }
    if (stx_file_meta(f, "step")) printf("step = %s\n", stx_file_meta(f, "step"));
    stx_file_close(f);
    return f != NULL;
}

static void test_files(void) {
    test_round_trip();
    test_no_tensors();
    test_many();
    test_headers();
    test_lengths();
    test_open_errors();
    test_dtypes();
    test_types();
    test_integers();
    test_params_types();
    test_params_grown();
    test_damaged();
    test_add_errors();
    test_finish_errors();
    test_replace();
#ifndef SEQTX_STDIO_FILES
    test_modes();
    test_links();
    test_leftovers();
    test_protected();
  #ifdef __linux__
    test_sync();
  #endif
    test_names();
    test_owner();
  #ifdef __linux__
    test_faults();
  #endif
#endif
    test_disk_full();
    test_kill();
    test_tools();
}

static void test_text(void) {
    test_words();
    test_words_unicode();
    test_orders();
    test_chars();
    test_bytes();
    test_compact();
    test_vocab_errors();
    test_encode();
    test_grow();
    test_ranges();
    test_blob();
    test_bad_blob();
    test_large_vocab();
    test_sparse();
    test_batches();
    test_wraps();
    test_records();
    test_roll();
    test_ids();
    test_pieces_errors();
    test_lists();
    test_marks();
    test_eval();
    test_eval_enwik8();
    test_ranks();
    test_batches_errors();
    test_position_errors();
    test_allocations();
}

int main(int argc, char **argv) {
    x = context(&count);
    if (!x) return 1;
    if (argc == 3) {
        int ok = !strcmp(argv[1], "--export") ? export_file(argv[2]) : import_file(argv[2]);
        if (!ok) printf("%s\n", stx_error(x));
        stx_destroy(x);
        return !ok;
    }
    if (!dir_create("io")) return 1;
    test_files();
    test_text();
    EXPECT(stx_ok(x));
    stx_destroy(x);
    EXPECT(count.live == 0);
    remove_tree(dir);
    if (skipped) printf("%d skipped\n", skipped);
    return test_end();
}
