/* The implementation of seqtx, in one file of the program; all others include headers
   only. It is compiled once, and can be optimised where the rest is not. */
#define SEQTX_IMPLEMENTATION
#include "seqtx_attn_span.h"
