/* predictor.h - a byte predictor that learns while it reads. Its interface does not
   expose seqtx. */
#ifndef PREDICTOR_H
#define PREDICTOR_H
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct predictor predictor;

/* Creates a predictor. Returns NULL if memory runs out. */
predictor *predictor_create(void);
void predictor_free(predictor *p);

/* Reads n bytes once and returns the bits per byte. Each block is scored before the
   model trains on it. */
double predictor_learn(predictor *p, const char *text, size_t n);

/* Writes to `out` up to n bytes that are likely to follow the prompt. Returns the
   number of bytes written. */
size_t predictor_continue(predictor *p, const char *prompt, char *out, size_t n);

/* Returns the message of the first error, or "" if there is none. */
const char *predictor_error(const predictor *p);

#ifdef __cplusplus
}
#endif
#endif
