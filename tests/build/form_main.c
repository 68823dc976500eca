/* form_main.c - the program that form.sh compiles in many ways. Exits with 0 if it works.

   FORM_HEADER     the header to test
   FORM_CALL       a function of the header that takes one pointer and accepts NULL
   FORM_IMPLEMENT  defined if this translation unit contains the implementation
   FORM_OTHER      defined if form_other.c is also linked */
#ifdef FORM_IMPLEMENT
  #define SEQTX_IMPLEMENTATION
#endif
#include FORM_HEADER
#include FORM_HEADER /* a second inclusion must have no effect */

#ifdef SEQTX_TESTS_HOSTILE_H
  #if !defined(A) || !defined(C) || !defined(I) || !defined(Z) || !defined(round)
    #error "a macro of the including file was undefined"
  #endif
#endif

#ifdef FORM_OTHER
  #ifdef __cplusplus
extern "C" {
  #endif
int form_other(void);
  #ifdef __cplusplus
}
  #endif
#endif

int main(void) {
    stx_ctx *x = stx_create(0);
    stx_real one = 1;
    int bad;
    (void)FORM_CALL(0);
    stx_begin(x, STX_EVAL);
    bad = !stx_ok(x) || !(stx_item(x, stx_scale(x, stx_input(x, &one, 1, 0, 0, 0), 3)) > 2);
    stx_destroy(x);
#ifdef FORM_OTHER
    bad |= form_other();
#endif
    return bad;
}
