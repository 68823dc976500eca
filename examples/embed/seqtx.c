/* The implementation of seqtx, which exactly one file of a program contains. It is
   compiled once, and can be optimised even if the rest of the program is not. */
#define SEQTX_IMPLEMENTATION
#include "seqtx_attn_span.h"
