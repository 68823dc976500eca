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

/* Writes up to n likely bytes that follow the prompt to out. Returns their number. */
size_t predictor_continue(predictor *p, const char *prompt, char *out, size_t n);

/* Returns the text of the first error, or "". */
const char *predictor_error(const predictor *p);

#ifdef __cplusplus
}
#endif
#endif
