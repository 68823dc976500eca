/* The one file of a program that has the implementation; all others include headers
   alone. The compiler sees it once, so it can be optimised where the rest is not. */
#define SEQTX_IMPLEMENTATION
#include "seqtx_attn_span.h"
