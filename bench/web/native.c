/* native.c - processor time of the page's training steps in a native build; see web.sh.
       native MODEL TEXT OPTIM ISA STEPS OPTIONS...
   MODEL is a safetensors file without tensors, ISA 0 (portable), 1 (AVX2) or 2 (AVX-512).
   OPTIONS are those of web.c. */
#include "../../examples/web/web.c"
#include <stdio.h>
#include <time.h>

static char *file(const char *path, size_t *n) {
    FILE *f = fopen(path, "rb");
    char *bytes = (char *)malloc(1 << 22);
    *n = f && bytes ? fread(bytes, 1, 1 << 22, f) : 0;
    if (f) fclose(f);
    return bytes;
}

int main(int argc, char **argv) {
    enum { FIRST = 6 };
    double option[sizeof(options) / sizeof(double)] = {0}, loss = 0;
    size_t n, i;
    clock_t begin = 0;
    char *bytes;
    int step, isa, steps;
    if (argc < FIRST) return 2;
    for (i = 0; i < sizeof option / sizeof *option && FIRST + (int)i < argc; i++)
        option[i] = atof(argv[FIRST + i]);
    bytes = file(argv[2], &n);
    web_text(bytes, n);
    free(bytes);
    bytes = file(argv[1], &n);
    isa = atoi(argv[4]);
    steps = atoi(argv[5]);
    if (!web_open(bytes, n, argv[3], (const options *)option)) {
        fprintf(stderr, "%s\n", web_error());
        return 1;
    }
    free(bytes);
    if (isa > run.x->isa) return 3;     /* the processor does not have it */
    run.x->isa = isa;
    run.x->micro = stx__choose_micro(STX_PREC_F32, isa);
    for (step = -3; step < steps; step++) {
        if (step == 0) begin = clock();
        loss = web_step();
    }
    printf("%.3f %.6f\n", 1000.0 * (double)(clock() - begin) / CLOCKS_PER_SEC / steps, loss);
    return 0;
}
