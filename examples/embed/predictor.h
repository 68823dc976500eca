/* predictor.h - a byte predictor that learns while it reads, for a program that should see nothing of seqtx. */
#ifndef PREDICTOR_H
#define PREDICTOR_H
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif
typedef struct predictor predictor;
predictor *predictor_create(void);                                  /* NULL without memory */
void       predictor_free(predictor *p);
double     predictor_learn(predictor *p, const char *text, size_t n);   /* reads n bytes once; bits per byte before each
                                                                           block was learnt */
size_t     predictor_continue(predictor *p, const char *prompt, char *out, size_t n);   /* writes n bytes that may follow; how many */
const char *predictor_error(const predictor *p);                    /* "" or what went wrong first */
#ifdef __cplusplus
}
#endif
#endif
