#pragma once
#include "config.h"
#include "context.h"
#include "train.h"


// >>api: files

/* Files in the safetensors format:

       8 bytes    N, little-endian
       N bytes    JSON: {"__metadata__": {"key": "value", ..}, "name":
                         {"dtype": "F32", "shape": [2,3], "data_offsets": [0,24]}, ..}
       the rest   the data of the tensors, little-endian, row-major, without gaps

   A file is mapped into memory and fully validated before any of its data is used.
   Writing is atomic: even if the process is killed, path names either the complete old
   file or the complete new one. Files, maps and writers belong to the caller, who must
   close them before the context is destroyed. All functions accept NULL for their object
   and do nothing after an error. */

/* Element types (stx_entry.dtype), with the names that they have in a file. STX_OTHER
   marks a tensor that can be listed but not read, because it has another type, such as
   F4, or more than STX_ENTRY_DIM dimensions. */
enum {
    STX_F32,     STX_F64, STX_BF16, STX_I32, STX_I64, STX_U8,  STX_F16,
    STX_BOOL,    STX_I8,  STX_I16,  STX_U16, STX_U32, STX_U64, STX_C64,
    STX_F8_E4M3, STX_F8_E5M2,
    STX_OTHER = -1
};

/* Most dimensions of a tensor in a file. Those of the tape have at most STX_MAX_DIM. */
#define STX_ENTRY_DIM 8

typedef struct stx_file   stx_file;
typedef struct stx_writer stx_writer;

/* A tensor of an open file, valid until the file is closed. */
typedef struct stx_entry {
    const char *name;
    int         dtype, ndim;        /* STX_F32 ..; ndim 0 is a scalar */
    size_t      dim[STX_ENTRY_DIM]; /* unused dimensions are 0 */
    const char *kind;               /* the type as written in the file */
    size_t      dims;               /* number of dimensions in the file; if it is above
                                       STX_ENTRY_DIM, ndim and dim are 0 */
    size_t      count, bytes;       /* count: number of elements; bytes: their total size */
    const void *data;               /* little-endian; can be unaligned if another program
                                       wrote the file */
    const stx_file *file;
} stx_entry;

/* Returns the bytes per element of a type; 0 for STX_OTHER and any other value. */
STX_DEF size_t stx_dtype_size(int dtype);

/* Opens and validates a file: the length of the header (at most 100 MB), strict JSON,
   unique names, data lengths that match shape and type, and no overlap, gap or excess in
   the data. A tensor that cannot be converted is an error only when it is read. Returns
   NULL and sets an error if the file cannot be read (STX_ERR_IO) or is not valid
   (STX_ERR_FORMAT). While it is open, the file can be replaced, as stx_writer does, but
   must not be truncated. */
STX_DEF stx_file *stx_file_open(stx_ctx *x, const char *path);
STX_DEF void stx_file_close(stx_file *f);

/* Opens n bytes in memory as a file. The bytes must not change until the file is
   closed. `name` is used in error texts. */
STX_DEF stx_file *stx_file_in_memory(stx_ctx *x, const char *name, const void *bytes, size_t n);

/* Access the entries, in the order of the header, and the metadata. Return NULL without
   an error if there is no such entry or key. */
STX_DEF size_t stx_file_count(const stx_file *f);
STX_DEF const stx_entry *stx_file_entry(const stx_file *f, size_t i);
STX_DEF const stx_entry *stx_file_find(const stx_file *f, const char *name);
STX_DEF const char *stx_file_meta(const stx_file *f, const char *key);

/* Returns the path of the file, or the name of the bytes in memory; NULL if f is NULL. */
STX_DEF const char *stx_file_path(const stx_file *f);

/* Copy an entry of n elements to out and convert it:

       from                              to f32      to f64      to i64
       --------------------------------  ----------  ----------  ----------------------
       F16, BF16, F8_E4M3, F8_E5M2, F32  exact       exact       refused
       F64                               to nearest  exact       refused
       BOOL (0 or 1), I8, U8, I16, U16   exact       exact       exact
       I32, U32                          to nearest  exact       exact
       I64                               to nearest  to nearest  exact
       U64                               to nearest  to nearest  exact up to 2^63 - 1
       C64, STX_OTHER                    refused     refused     refused

   Return 1; or set an error, leave out unchanged and return 0 if the entry has a
   different number of elements, or if it or one of its values is refused. If e is NULL,
   they return 0 without an error, because only the caller knows the name. */
STX_DEF int stx_entry_get_f32(const stx_entry *e, float *out, size_t n);
STX_DEF int stx_entry_get_f64(const stx_entry *e, double *out, size_t n);
STX_DEF int stx_entry_get_i64(const stx_entry *e, int64_t *out, size_t n);

/* A writer collects tensors and metadata. Names and metadata are copied; data is not, and
   must not change until stx_writer_finish. The header lists the entries in the order in
   which they were added. The data is sorted by element size, 8 bytes first, so that every
   tensor is aligned. stx_writer_add takes every type except STX_OTHER and at most
   STX_ENTRY_DIM dimensions. stx_writer_add and _meta return 1. If a name is empty, a
   duplicate or not UTF-8, or a size overflows, they set an error and return 0, and
   stx_writer_finish will fail. */
STX_DEF stx_writer *stx_writer_create(stx_ctx *x);
STX_DEF int stx_writer_add(stx_writer *w, const char *name, int dtype, int ndim, const size_t *dim,
                           const void *data);
STX_DEF int stx_writer_meta(stx_writer *w, const char *key, const char *value);

/* Like stx_writer_add, but copies the data. */
STX_DEF int stx_writer_add_copy(stx_writer *w, const char *name, int dtype, int ndim,
                                const size_t *dim, const void *data);

/* Writes the file and frees w, even after an error. Returns 1. On failure, sets an error
   (STX_ERR_IO), leaves the old file unchanged and returns 0.

   The data is written to a temporary file in the same directory (PATH.<pid>.<n>.tmp, with
   the file name cut to 100 bytes). Every write is checked, the file is synced and renamed
   to path, and the directory is synced. If path is a symbolic link, its target is
   replaced. The permission bits of an existing file are kept, and its group and owner as
   far as the system permits. Other hard links keep the old contents; access control lists
   and the set-user-id bit are lost. It is an error if path is a write-protected file or
   not a regular file. A *.tmp file remains only if the process is killed; the next write
   to the same path removes it unless another process still holds its lock. */
STX_DEF int stx_writer_finish(stx_writer *w, const char *path);

/* Returns the file as *n bytes in memory, for example to send it. Free them with
   stx_block_free. Frees w, even after an error. Returns NULL after an error. */
STX_DEF void *stx_writer_bytes(stx_writer *w, size_t *n);

/* Frees w without writing. */
STX_DEF void stx_writer_free(stx_writer *w);

/* A read-only view of a whole file, which is mapped into memory, or read into memory if
   there is no mmap. An empty file has size 0. stx_map_open returns 1; or sets an error
   and returns 0 if path is not a readable regular file. The file must not be truncated
   while it is open. stx_map_close resets m. */
typedef struct stx_map {
    const unsigned char *data;
    size_t size;
    stx_ctx *ctx;
} stx_map;

STX_DEF int stx_map_open(stx_ctx *x, stx_map *m, const char *path);
STX_DEF void stx_map_close(stx_map *m);

/* Decodes the UTF-8 character at s, where n bytes can be read. Writes the code point to
   *c and returns the length of the character in bytes, 1 to 4. Returns 0 if n is 0 or
   the character is invalid: incomplete, overlong, a surrogate, or above U+10FFFF. */
STX_DEF size_t stx_utf8(const void *s, size_t n, uint32_t *c);


// >>api: checkpoints

/* STX_REAL_DTYPE is the dtype of stx_real. stx_entry_get calls stx_entry_get_f32 or
   _f64, whichever matches stx_real. */
#ifdef SEQTX_DOUBLE
enum { STX_REAL_DTYPE = STX_F64 };
#else
enum { STX_REAL_DTYPE = STX_F32 };
#endif

STX_DEF int stx_entry_get(const stx_entry *e, stx_real *out, size_t n);

/* Write and read an integer in the metadata, as decimal text. Return 1; or set an error
   and return 0, for example if the integer is missing or malformed. */
STX_DEF int stx_writer_meta_u64(stx_writer *w, const char *key, uint64_t value);
STX_DEF int stx_file_meta_u64(stx_ctx *x, const stx_file *f, const char *key, uint64_t *out);

/* A checksum detects damage, but not forgery. stx_writer_checksum stores a 64-bit hash of
   all tensors and metadata added so far, under the key "seal"; call it last.
   stx_file_verify reads the whole file and returns 1; or sets an error and returns 0 if
   the file does not match its checksum or has none. */
STX_DEF int stx_writer_checksum(stx_writer *w);
STX_DEF int stx_file_verify(const stx_file *f);

/* Device memory in files. stx_writer_add_device copies the elements immediately and
   stores them as floats. stx_entry_upload fills n elements of device memory from an
   entry. Return 1, or 0 after an error. */
STX_DEF int stx_writer_add_device(stx_writer *w, const char *name, int ndim, const size_t *dim,
                                  const stx_real *data);
STX_DEF int stx_entry_upload(const stx_entry *e, stx_real *to, size_t n);

/* Save and load all parameters of a list, under prefix + name; prefix can be "". The data
   must not change until stx_writer_finish. Loading checks all names, shapes and types
   before it copies anything: if the file lacks a parameter, or has it in a different
   shape or in a type other than F32, F64, F16 and BF16, it sets an error
   (STX_ERR_FORMAT) and changes nothing. Integers and F8 are refused because such weights
   usually require a scale. Other entries are ignored. Return 1, or 0 after an error. */
STX_DEF int stx_params_save(stx_writer *w, const stx_params *p, const char *prefix);
STX_DEF int stx_params_load(stx_params *p, const stx_file *f, const char *prefix);

/* Like stx_params_load, for a model whose vocabulary has `rows` more tokens at its end
   (stx_vocab_grow) than the saved one. Parameters with that many rows more than in the
   file receive the file's rows as their first rows, bit for bit; their last `rows` rows
   keep their values, which are those of the initialiser in a new model. These are the
   embedding, the output weight and the output bias or, with an adaptive input or output,
   those of the last cluster. All other shapes must be equal. The state of an optimiser
   cannot be loaded in this way: start with a new one. */
STX_DEF int stx_params_load_grown(stx_params *p, const stx_file *f, const char *prefix,
                                  size_t rows);

/* Save and load the state of an optimiser: entries "optim.<k>.<name>", metadata
   "optim.kind", "optim.step" and "optim.skipped". With stx_group_desc.shard, all ranks
   call stx_optim_save: rank 0 writes the whole state, and the other ranks pass NULL for
   w. stx_optim_save_as and _load_as put prefix, at most 64 bytes, in front of all
   names, so that one file can contain several optimisers. Return 1, or 0 after an
   error. */
STX_DEF int stx_optim_save(stx_writer *w, const stx_optim *o);
STX_DEF int stx_optim_load(stx_optim *o, const stx_file *f);
STX_DEF int stx_optim_save_as(stx_writer *w, const stx_optim *o, const char *prefix);
STX_DEF int stx_optim_load_as(stx_optim *o, const stx_file *f, const char *prefix);
