#pragma once
#include "config.h"
#include "context.h"
#include "files.h"
#include "lm.h"


// >>api: models in files

/* A model in a file: its parameters, and metadata from which the model can be created
   again.

       "model.family"     "attn_span", "sru", "compressive" or "par"
       "model.version"    "1", the version of these entries
       "model.<field>"    a field of the desc, with the defaults filled in, such as
                          "model.layers". Elements of lists are separated by commas; zeros
                          at the end of a fixed array are omitted, and SIZE_MAX is "none".
                          All keys that begin with "model." are reserved

   Programs call the functions of a family: stx_span_open creates the model in a file, and
   stx_span_save writes a file. They consist of the functions below, with which a program
   can store more in the same file, for example an optimiser or a vocabulary. The trainers
   write these entries in their checkpoints. */

/* Kinds of fields. */
enum {
    STX_FIELD_SIZE = 1,     /* size_t */
    STX_FIELD_INT,          /* int */
    STX_FIELD_UNSIGNED,     /* unsigned */
    STX_FIELD_INT32,        /* int32_t */
    STX_FIELD_REAL,         /* double; must be finite */
    STX_FIELD_TEXT,         /* const char *: UTF-8; NULL and "" are equivalent */
    STX_FIELD_LIST,         /* const size_t *: a list of *(size_t *)(desc + length) elements, or
                               NULL */
    STX_FIELD_SETTING,      /* size_t that is not part of the model: not stored */
    STX_FIELD_CODE          /* pointer to code or to its data: not stored. A model in which it is
                               not NULL cannot be saved */
};

/* A field of a desc. */
typedef struct stx_field {
    const char *name;       /* at most 40 bytes */
    int         kind;       /* STX_FIELD_.. */
    size_t      offset;     /* in the desc */
    size_t      count;      /* number of elements of an array; 1 otherwise */
    size_t      length;     /* STX_FIELD_LIST: offset of the number of elements, a field that is
                               earlier in the table */
} stx_field;

/* An entry of a table of fields. STX_FIELD_ARRAY is for arrays, and STX_FIELD_LIST_OF for
   lists whose number of elements is the field `length`. */
#define STX_FIELD(desc, kind, name) {#name, STX_FIELD_##kind, offsetof(desc, name), 1, 0}
#define STX_FIELD_ARRAY(desc, kind, name) \
    {#name, STX_FIELD_##kind, offsetof(desc, name), \
     sizeof(((desc *)0)->name) / sizeof(((desc *)0)->name[0]), 0}
#define STX_FIELD_LIST_OF(desc, name, length) \
    {#name, STX_FIELD_LIST, offsetof(desc, name), 1, offsetof(desc, length)}

/* A model family. stx_span_family, stx_sru_family, stx_comp_family and stx_par_family
   return those of the library. */
struct stx_family {
    const char      *name;          /* "model.family" */
    size_t           desc_size;     /* sizeof the desc */
    const stx_field *field;         /* [fields]: all fields of the desc, in any order */
    size_t           fields;
    void       *(*create)(stx_ctx *x, const void *desc);    /* such as stx_span_create */
    const void *(*desc)(const void *model);         /* the desc, with the defaults filled in:
                                                       create(x, desc) creates the same
                                                       model */
    stx_params *(*params)(void *model, int k);      /* the k-th list of parameters, from 0 on;
                                                       NULL: there are no more */
    stx_lm      (*as_lm)(void *model);              /* such as stx_span_as_lm */
};

/* Creates the model in the file at path, in context x, which owns it. The file must
   describe a model of this family and have all of its tensors, in any floating-point
   type; other entries are ignored. If the file has a checksum (stx_writer_checksum), it
   is verified. Returns NULL and sets an error that names the file and the entry. Nothing
   has then been allocated in x, unless x has run out of memory. On a GPU, the parameters
   are in its memory. To round the weights to bf16 or 8 bits, call stx_params_pack. */
STX_DEF void *stx_model_open(stx_ctx *x, const stx_family *family, const char *path);

/* Writes a model, with a checksum, to a file; see stx_writer_finish. Returns 1, or sets
   an error and returns 0. */
STX_DEF int stx_model_save(const stx_family *family, void *model, const char *path);

/* For files that contain more than a model: stx_model_read is stx_model_open for an open
   file, and stx_model_write adds the entries of a model to a writer. The parameters must
   not change until stx_writer_finish. Call stx_writer_checksum after the last entry. */
STX_DEF void *stx_model_read(stx_ctx *x, const stx_family *family, const stx_file *f);
STX_DEF int stx_model_write(stx_writer *w, const stx_family *family, void *model);

/* Read and write only the desc. stx_desc_read fills in *desc, of family->desc_size bytes;
   its texts and lists are valid until stx_destroy. It checks that all fields are there
   and well-formed; creating a model checks their values. Return 1, or set an error and
   return 0. */
STX_DEF int stx_desc_read(stx_ctx *x, const stx_family *family, const stx_file *f, void *desc);
STX_DEF int stx_desc_write(stx_writer *w, const stx_family *family, const void *desc);

/* Creates the model in the file at path if it belongs to one of n families, and returns
   it as a table of functions. After an error, all fields of the result are NULL. */
STX_DEF stx_lm stx_lm_open(stx_ctx *x, const char *path, const stx_family *const *family,
                           size_t n);
