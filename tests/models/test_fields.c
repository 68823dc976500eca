/* test_fields.c - the table of fields of each family lists every field of its desc. The
   structs are packed here, so that they have no padding: their size is the sum of the
   sizes of all fields. Without this, a new field could hide in the padding. */
#include "../../seqtx.h"
#pragma pack(push, 1)
#include "../../seqtx_attn_span.h"
#include "../../seqtx_compressive.h"
#include "../../seqtx_par.h"
#include "../../seqtx_sru.h"
#pragma pack(pop)
#include "../test.h"

static size_t size_of(int kind) {
    switch (kind) {
    case STX_FIELD_SIZE:
    case STX_FIELD_SETTING: return sizeof(size_t);
    case STX_FIELD_INT: return sizeof(int);
    case STX_FIELD_UNSIGNED: return sizeof(unsigned);
    case STX_FIELD_INT32: return sizeof(int32_t);
    case STX_FIELD_REAL: return sizeof(double);
    case STX_FIELD_TEXT:
    case STX_FIELD_LIST:
    case STX_FIELD_CODE: return sizeof(void *);
    default: return 0;
    }
}

/* `packed` is the size of the desc without padding. */
static void table(const stx_family *f, size_t packed) {
    size_t i, k, sum = 0, length;
    for (i = 0; i < f->fields; i++) {
        const stx_field *p = &f->field[i];
        const size_t end = p->offset + p->count * size_of(p->kind);
        sum += p->count * size_of(p->kind);
        CHECK(size_of(p->kind) && p->count && strlen(p->name) <= 40, "%s %s", f->name, p->name);
        CHECK(end <= f->desc_size, "%s %s: beyond the desc", f->name, p->name);
        for (k = 0; k < i; k++) {
            const stx_field *q = &f->field[k];
            CHECK(strcmp(p->name, q->name), "%s %s: twice", f->name, p->name);
            CHECK(end <= q->offset || q->offset + q->count * size_of(q->kind) <= p->offset,
                  "%s: %s overlaps %s", f->name, p->name, q->name);
        }
        length = SIZE_MAX; /* the index of a list's length */
        for (k = 0; k < f->fields && p->kind == STX_FIELD_LIST; k++)
            if (f->field[k].offset == p->length && f->field[k].kind == STX_FIELD_SIZE) length = k;
        CHECK(p->kind != STX_FIELD_LIST || length < i, "%s %s: its length is not an earlier field",
              f->name, p->name);
    }
    CHECK(sum == packed, "%s: the fields in the table have %zu bytes, those of the desc %zu",
          f->name, sum, packed);
}

int main(void) {
    table(stx_span_family(), sizeof(stx_span_desc));
    table(stx_sru_family(), sizeof(stx_sru_lm_desc));
    table(stx_comp_family(), sizeof(stx_comp_desc));
    table(stx_par_family(), sizeof(stx_par_desc));
    printf("%ld passed, %ld failed\n", test_passed, test_failed);
    return test_failed != 0;
}
