/* Compiles the implementation of seqtx, which exactly one file of a program must do. In
   a separate file, it can be optimised even if the rest of the program is not. */
#define SEQTX_IMPLEMENTATION
#include "seqtx_attn_span.h"
