/* main.c - a program that consists of several C files. This one includes only
   predictor.h. To build and run the program:
       cc -O2 -I../.. main.c predictor.c seqtx.c -lm -pthread -o embed && ./embed
   The optional argument is the number of passes over the text. */
#include "predictor.h"
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv) {
    const char text[] = "the cat sat on the mat. the cat sat on the mat. "
                        "the cat sat on the mat. the cat sat on the mat. ";
    char out[49] = "";
    int passes = argc > 1 ? atoi(argv[1]) : 60;
    predictor *p = predictor_create();
    if (!p) return 1;
    for (int pass = 1; pass <= passes; pass++) {
        double bits = predictor_learn(p, text, sizeof text - 1);
        if (pass % 20 == 0 || pass == passes) printf("pass %d: %.3f bits per byte\n", pass, bits);
    }
    predictor_continue(p, "the cat", out, sizeof out - 1);
    printf("the cat|%s\n", out);
    if (*predictor_error(p)) fprintf(stderr, "embed: %s\n", predictor_error(p));
    int ok = !*predictor_error(p);
    predictor_free(p);
    return !ok;
}
