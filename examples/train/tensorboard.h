#pragma once
#include "base.h"
#include "buffer.h"
#include "files.h"


// >>board: TensorBoard event files

/* An event file is a sequence of records. Their integers are little-endian:

       u64 length | u32 masked CRC of these 8 bytes | payload | u32 masked CRC of payload

   Each payload is a protocol buffer of type Event (tensorflow/core/util/event.proto):

       Event       1: double wall_time   2: int64 step   3: string file_version
                   5: Summary            7: SessionLog
       Summary     1: repeated Value, with 1: string tag   2: float simple_value
       SessionLog  1: status, with START = 1 */

/* CRC-32C (Castagnoli), with the reflected polynomial 0x82F63B78. Computed bit by bit,
   because the record of a scalar has only about sixty bytes. */
TR_DEF uint32_t tr_crc32c(const void *bytes, size_t n) {
    const unsigned char *p = (const unsigned char *)bytes;
    uint32_t crc = 0xFFFFFFFFu;
    int bit;
    while (n-- > 0) {
        crc ^= *p++;
        for (bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ ((crc & 1) ? 0x82F63B78u : 0u);
    }
    return crc ^ 0xFFFFFFFFu;
}

/* Returns the CRC in the masked form of TFRecord files. The mask is needed because the
   data can itself contain CRCs. */
TR_DEF uint32_t tr_crc32c_masked(const void *bytes, size_t n) {
    uint32_t crc = tr_crc32c(bytes, n);
    return ((crc >> 15) | (crc << 17)) + 0xA282EAD8u;
}

TR_DEF void tr_put_le(tr_buf *b, uint64_t x, int bytes) {
    while (bytes-- > 0) {
        char c = (char)(x & 0xFF);
        tr_buf_put(b, &c, 1);
        x >>= 8;
    }
}

/* Appends a protocol-buffer varint: 7 bits per byte, lowest bits first. The high bit is
   set in all bytes but the last. */
TR_DEF void tr_put_varint(tr_buf *b, uint64_t x) {
    for (; x >= 0x80; x >>= 7) tr_put_le(b, (x & 0x7F) | 0x80, 1);
    tr_put_le(b, x, 1);
}

TR_DEF void tr_put_bytes(tr_buf *b, unsigned field, const void *bytes, size_t n) {
    tr_put_varint(b, field << 3 | 2);       /* wire type 2: length-delimited */
    tr_put_varint(b, n);
    if (n > 0) tr_buf_put(b, bytes, n);
}

typedef struct {
    tr_appender out;
    tr_buf      value, summary, event, record;
    char        err[TR_ERR];    /* set when tr_board_scalar returns 0 */
} tr_board;

TR_DEF void tr_board_event(tr_board *b, uint64_t step) {
    struct timespec t;
    double wall;
    uint64_t bits;
    clock_gettime(CLOCK_REALTIME, &t);
    wall = (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
    memcpy(&bits, &wall, sizeof bits);
    b->value.n = b->summary.n = b->event.n = b->record.n = 0;
    tr_put_varint(&b->event, 1 << 3 | 1);       /* wire type 1: eight bytes */
    tr_put_le(&b->event, bits, 8);
    tr_put_varint(&b->event, 2 << 3 | 0);       /* wire type 0: varint */
    tr_put_varint(&b->event, step > (uint64_t)INT64_MAX ? (uint64_t)INT64_MAX : step);
}

TR_DEF int tr_board_write(tr_board *b) {
    tr_buf *r = &b->record;
    if (b->event.oom)
        return tr_fail(b->err, sizeof b->err, "%s: out of memory: cannot write an event",
                       b->out.path);
    tr_put_le(r, b->event.n, 8);
    if (!r->oom) tr_put_le(r, tr_crc32c_masked(r->s, 8), 4);
    tr_buf_put(r, b->event.s, b->event.n);
    tr_put_le(r, tr_crc32c_masked(b->event.s, b->event.n), 4);
    if (b->value.oom || b->summary.oom || r->oom)
        return tr_fail(b->err, sizeof b->err, "%s: out of memory: cannot write an event",
                       b->out.path);
    return tr_append(&b->out, r->s, r->n, b->err, sizeof b->err);
}

TR_DEF int tr_board_close(tr_board *b) {
    tr_buf_free(&b->value);
    tr_buf_free(&b->summary);
    tr_buf_free(&b->event);
    tr_buf_free(&b->record);
    return tr_append_close(&b->out, b->err, sizeof b->err);
}

/* Opens a new event file in dir, which is created if necessary. If dir is NULL, no file
   is written. resume_step is the step after which a run resumes, or 0 for a new run.
   When a run resumes, TensorBoard ignores points after that step in earlier files of the
   directory. */
TR_DEF int tr_board_open(tr_board *b, const char *dir, uint64_t resume_step, char *err,
                         size_t size) {
    char host[256], *path, *c;
    size_t capacity;
    int i, ok = 0;
    memset(b, 0, sizeof *b);
    b->out.fd = -1;
    if (dir == NULL) return 1;
    if (!tr_mkdirs(dir, err, size)) return 0;
    if (gethostname(host, sizeof host) != 0) strcpy(host, "host");
    host[sizeof host - 1] = 0;
    for (c = host; *c; c++)
        if (*c == '/') *c = '-';

    capacity = strlen(dir) + sizeof host + 128;
    path = (char *)malloc(capacity);
    if (path == NULL)
        return tr_fail(err, size, "%s: out of memory: cannot create an event file", dir);
    /* if there is already a file from the same second, add a number to the name */
    for (i = 0; i < 1000; i++) {
        int n = snprintf(path, capacity, "%s/events.out.tfevents.%010lld.%s.%ld", dir,
                         (long long)time(NULL), host, (long)getpid());
        if (i > 0) snprintf(path + n, capacity - (size_t)n, ".%d", i);
        ok = tr_append_open(&b->out, path, O_EXCL, err, size);
        if (ok || errno != EEXIST) break;
    }
    free(path);
    if (!ok) return 0;

    tr_board_event(b, 0);
    tr_put_bytes(&b->event, 3, "brain.Event:2", 13);
    ok = tr_board_write(b);
    if (ok && resume_step > 0) {
        tr_board_event(b, resume_step < UINT64_MAX ? resume_step + 1 : resume_step);
        tr_put_bytes(&b->event, 7, "\010\001", 2);      /* SessionLog { status: START } */
        ok = tr_board_write(b);
    }
    if (!ok) {
        tr_fail(err, size, "%s", b->err);
        tr_board_close(b);
    }
    return ok;
}

/* Adds one point to the curve `tag`, such as "train/loss". The point is in the file
   when the function returns. If it cannot be written, returns 0 with the reason in
   b->err. After a failed write, later points are dropped and the function returns 1. */
TR_DEF int tr_board_scalar(tr_board *b, const char *tag, uint64_t step, double x) {
    float f = (float)HUGE_VAL;
    uint32_t bits;
    if (b->out.fd < 0) return 1;
    if (x < -FLT_MAX) f = -f;
    else if (!(x > FLT_MAX)) f = (float)x;      /* NaN stays NaN */
    memcpy(&bits, &f, sizeof bits);
    tr_board_event(b, step);
    tr_put_bytes(&b->value, 1, tag, strlen(tag));
    tr_put_varint(&b->value, 2 << 3 | 5);       /* wire type 5: four bytes */
    tr_put_le(&b->value, bits, 4);
    if (!b->value.oom) tr_put_bytes(&b->summary, 1, b->value.s, b->value.n);
    if (!b->summary.oom) tr_put_bytes(&b->event, 5, b->summary.s, b->summary.n);
    return tr_board_write(b);
}
