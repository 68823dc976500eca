#define SEQTX_IMPLEMENTATION
#include "seqtx_sru.h"
#include <stdio.h>

int main(void) {
    stx_ctx *x = stx_create(NULL);
    int failed = !stx_ok(x);
    printf("seqtx %s, %s\n", stx_version(), stx_backend(x));
    stx_destroy(x);
    return failed;
}
