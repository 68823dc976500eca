#pragma once
#include "../api/config.h"
#include "../api/context.h"
#include "../api/files.h"
#include "../core/platform.h"
#include "../core/text.h"


// >>files

/* Files have the safetensors format: a header with text metadata and a description of
   each tensor, followed by the tensors' data.

       bytes          content
       -------------  ------------------------------------------------------------------
       8              N, the length of the header in bytes, little-endian; at most 10^8
       N              JSON: {"__metadata__": {"key": "value", ..},
                             "name": {"dtype": "F32", "shape": [2,3],
                                      "data_offsets": [0,24]}, ..}
       rest           data of the tensors, little-endian, row-major

   data_offsets holds the positions of a tensor's first byte and of the byte after its
   last one, counted from the end of the header. The tensors tile the data, without gaps,
   overlaps or trailing bytes. The reader accepts tensors in any order. The writer sorts
   them by element size, largest first, and pads the header with spaces to a multiple of 8
   bytes, so that every tensor is aligned to its element size.

   Reading. The file is mapped, or read into memory on systems without mmap. Before any of
   its data is used, the structure of the header, all sizes and offsets, and the
   uniqueness of names are checked. The parser accepts only the JSON that a header can
   contain. It does not recurse, so no input can exhaust the stack.

   Writing replaces a file atomically:

       1. create STEM.<pid>.<n>.tmp in the directory of the file, and lock it
       2. write all data, check each write, and flush the temporary file to disk
       3. rename it to the name of the file
       4. flush the directory to disk

   If the process is killed at any point, the name refers either to the complete old file
   or to the complete new one. A *.tmp file may remain. The next write to the same name
   removes it, because its lock ended with the process. Temporary files that other
   processes are still writing are locked, so they are kept. */


// >>files: mapping

#define STX__HEADER_MAX 100000000u  /* the format's limit on the JSON header, in bytes */
#define STX__HEADER_PAD 8u          /* the data starts at a multiple of 8 bytes */

enum { STX__DTYPES = STX_F8_E5M2 + 1 };

/* The element types, indexed by STX_F32 .. STX_F8_E5M2. They are followed by types whose
   name and size are known, so that their data can be validated, but which the library
   cannot read (STX_OTHER). */
static const struct {
    const char *name;
    size_t bits;
} stx__dtype[] = {{"F32", 32},        {"F64", 64},        {"BF16", 16},    {"I32", 32},
                  {"I64", 64},        {"U8", 8},          {"F16", 16},     {"BOOL", 8},
                  {"I8", 8},          {"I16", 16},        {"U16", 16},     {"U32", 32},
                  {"U64", 64},        {"C64", 64},        {"F8_E4M3", 8},  {"F8_E5M2", 8},
                  {"F8_E8M0", 8},     {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8},
                  {"F6_E2M3", 6},     {"F6_E3M2", 6},     {"F4", 4}};

enum { STX__DTYPES_KNOWN = sizeof stx__dtype / sizeof *stx__dtype };

STX_DEF size_t stx_dtype_size(int dtype) {
    return dtype >= 0 && dtype < STX__DTYPES ? stx__dtype[dtype].bits / 8 : 0;
}

STX_DEF void stx_map_close(stx_map *m) {
    if (!m) return;
#ifdef STX__POSIX
    if (m->size) munmap((void *)(uintptr_t)m->data, m->size);
#else
    if (m->size) stx_block_free(m->ctx, (void *)(uintptr_t)m->data);
#endif
    memset(m, 0, sizeof *m);
}

/* Checks the arguments of stx_map_open and clears the map. */
static int stx__map_begin(stx_ctx *x, stx_map *m, const char *path) {
    if (stx_ok(x) && (!m || !path))
        stx_fail(x, STX_ERR_ARG, "stx_map_open: expected a map and a path, got NULL for the %s",
                 m ? "path" : "map");
    if (!m) return 0;
    memset(m, 0, sizeof *m);
    m->ctx = x;
    return stx_ok(x);
}

static void stx__cannot_open(stx_ctx *x, const char *path) {
    stx_fail(x, STX_ERR_IO, "cannot open %s: %s; check the path and its permissions", path,
             strerror(errno));
}

#ifdef STX__POSIX

/* Calls open() with close-on-exec. -std=c99 hides O_CLOEXEC. glibc still defines it as
   __O_CLOEXEC; on other systems fcntl sets the flag after the call. */
static int stx__open(const char *path, int flags, int mode) {
    int fd;
  #if defined(O_CLOEXEC)
    flags |= O_CLOEXEC;
  #elif defined(__O_CLOEXEC)
    flags |= __O_CLOEXEC;
  #endif
    do {
        fd = open(path, flags, (mode_t)mode);
    } while (fd < 0 && errno == EINTR);
  #if !defined(O_CLOEXEC) && !defined(__O_CLOEXEC)
    if (fd >= 0) (void)fcntl(fd, F_SETFD, FD_CLOEXEC);
  #endif
    return fd;
}

static int stx__map_fd(stx_ctx *x, stx_map *m, const char *path, int fd) {
    struct stat st;
    void *p;
    if (fstat(fd, &st) != 0) {
        stx_fail(x, STX_ERR_IO, "cannot examine %s: %s", path, strerror(errno));
        return 0;
    }
    if (!S_ISREG(st.st_mode)) {
        stx_fail(x, STX_ERR_IO,
                 "cannot read %s: it is %s; use a regular file (write the output of a pipe to a "
                 "file first)", path, S_ISDIR(st.st_mode) ? "a directory" : "not a regular file");
        return 0;
    }
    if ((uintmax_t)st.st_size > SIZE_MAX / 2) {
        stx_fail(x, STX_ERR_IO,
                 "cannot map %s: its %llu bytes are more than this program can address; use a "
                 "smaller file or a 64-bit build", path, (unsigned long long)st.st_size);
        return 0;
    }
    if (st.st_size == 0) return 1;
    p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) {
        stx_fail(x, STX_ERR_IO, "cannot map %s (%llu bytes): %s", path,
                 (unsigned long long)st.st_size, strerror(errno));
        return 0;
    }
    m->data = (const unsigned char *)p;
    m->size = (size_t)st.st_size;
    return 1;
}

STX_DEF int stx_map_open(stx_ctx *x, stx_map *m, const char *path) {
    int fd, ok;
    if (!stx__map_begin(x, m, path)) return 0;
    /* with O_NONBLOCK, a named pipe is rejected without waiting for a writer */
    fd = stx__open(path, O_RDONLY | O_NONBLOCK, 0);
    if (fd < 0) {
        stx__cannot_open(x, path);
        return 0;
    }
    ok = stx__map_fd(x, m, path, fd);
    close(fd);
    return ok;
}

#else

STX_DEF int stx_map_open(stx_ctx *x, stx_map *m, const char *path) {
    unsigned char *buf = NULL, *q;
    size_t n = 0, cap = 0, k;
    FILE *f;
    if (!stx__map_begin(x, m, path)) return 0;
    f = fopen(path, "rb");
    if (!f) {
        stx__cannot_open(x, path);
        return 0;
    }
    do {
        q = (unsigned char *)stx__grow(x, buf, n, &cap, 1);
        if (!q) break;
        buf = q;
        k = fread(buf + n, 1, cap - n, f);
        n += k;
    } while (k);
    if (q && ferror(f)) {
        stx_fail(x, STX_ERR_IO, "cannot read %s: %s; use a regular file", path, strerror(errno));
        q = NULL;
    }
    fclose(f);
    if (!q || !n) {
        stx_block_free(x, buf);
        return q != NULL;
    }
    m->data = buf;
    m->size = n;
    return 1;
}

#endif
