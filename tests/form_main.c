/* form_main.c - the program that form.sh compiles in many ways. FORM_HEADER is the
   header, FORM_CALL one of its functions (any that takes one pointer: NULL is accepted
   everywhere), FORM_IMPLEMENT makes this the unit with the implementation, FORM_OTHER
   says that form_other.c is linked too. Exits with 0 when all is well. */
#ifdef FORM_IMPLEMENT
  #define SEQTX_IMPLEMENTATION
#endif
#include FORM_HEADER
#include FORM_HEADER /* a second time does nothing */

#ifdef SEQTX_TESTS_HOSTILE_H
  #if !defined(A) || !defined(C) || !defined(I) || !defined(Z) || !defined(round)
    #error "a macro of the including file is gone"
  #endif
#endif

#ifdef FORM_OTHER
  #ifdef __cplusplus
extern "C"
  #endif
    int
    form_other(void);
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
